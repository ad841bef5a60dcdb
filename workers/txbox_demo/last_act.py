"""The last act: Spark loads the whole file while the workers are still busy with a part of it.

Both roads lead through one inbox, so it does not matter who comes first. The workers' purchases are taken from all over
the file. A third of them are published before the load has merged its first chunk, and the rest while it goes on: some
are processed by the workers and found by the load, others the other way round. Nobody is notified: a bulk load catches
up on what is past.
"""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Engine, text

from txbox import Outcome, TxboxError
from txbox.outbox.outbox import Outbox, Outgoing
from txbox.postgres.urls import DATABASE_URL_VARIABLE
from txbox_aws.sqs import queue_backlog
from txbox_demo.accounting import Comparison, compare
from txbox_demo.billing import SUBSCRIBER, read_accounts
from txbox_demo.crew import BILLING, RELAY, Crew, Team
from txbox_demo.fork_server import ForkServer
from txbox_demo.journal import read_journals
from txbox_demo.orders import Orders
from txbox_demo.place import Place
from txbox_demo.purchases import TOTAL_PURCHASES, Purchase, read_purchases, totals

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

__all__ = ["LastAct", "run_last_act"]

BEFORE_THE_LOAD = 3
"""One of so many messages is published before the load has merged a chunk."""

WORKERS = 2

WORKERS_PURCHASES = 7_000
"""So many of the file's purchases go to the workers."""

CHUNK_ROWS = 10_000
"""Small, so that the workers meet the load in many chunks."""

LONGEST_SECONDS = 300.0
"""After that, something is broken."""

LOOK_SECONDS = 0.1
"""Between looks at processes, a queue and a database, which have no signal in common."""

FIELDS = "event_id string, customer_id string, date string, cds int, cents bigint"

APPLY = """
INSERT INTO account (customer_id, purchases, cds, cents)
SELECT customer_id, count(*), sum(cds), sum(cents) FROM fresh_event GROUP BY customer_id ORDER BY customer_id
ON CONFLICT (customer_id) DO UPDATE
SET purchases = account.purchases + excluded.purchases,
  cds = account.cds + excluded.cds,
  cents = account.cents + excluded.cents
"""


@dataclass(frozen=True, slots=True)
class LastAct:
    """What the last act has come to.

    Attributes:
        load: the report of the bulk load.
        processed_by_workers: messages that workers were first with.
        rejected_by_workers: deliveries that the inbox rejected.
        left_for_workers: messages not published when the load had merged its first chunk.
        recorded: ids in the inbox.
        comparison: the accounts against the whole file.
        seconds: how long it took.
    """

    load: dict[str, Any]
    processed_by_workers: int
    rejected_by_workers: int
    left_for_workers: int
    recorded: int
    comparison: Comparison
    seconds: float

    @property
    def adds_up(self) -> bool:
        """Whether every purchase was applied by exactly one of the two roads."""
        applied = int(self.load["applied"]) + self.processed_by_workers
        return applied == self.recorded == int(self.load["read"]) == TOTAL_PURCHASES

    @property
    def exact(self) -> bool:
        """Whether every customer is right to the cent, and the figures add up."""
        return self.comparison.exact and self.adds_up

    def as_dict(self) -> dict[str, Any]:
        """Return all figures as plain values."""
        return {
            "exact": self.exact,
            "adds_up": self.adds_up,
            "load": self.load,
            "processed_by_workers": self.processed_by_workers,
            "rejected_by_workers": self.rejected_by_workers,
            "left_for_workers": self.left_for_workers,
            "recorded": self.recorded,
            "wrong_customers": len(self.comparison.wrong),
            "difference_cents": self.comparison.difference_cents,
            "seconds": round(self.seconds, 1),
        }


def run_last_act(
    place: Place, client: "SQSClient", server: ForkServer, orders: Orders, *, say: Callable[[str], None]
) -> LastAct:
    """Load the whole file while workers process a part of it.

    Args:
        place: where.
        client: an SQS client of boto3.
        server: forks the processes.
        orders: what is the same for all of them; their directory is empty.
        say: is told what happens.

    Raises:
        TxboxError: the load failed, or nothing comes to an end.
    """
    begun = time.monotonic()
    directory = Path(orders.directory)
    before, beside = _parts(WORKERS_PURCHASES)
    crew = Crew(server, [Team(RELAY, 1), Team(BILLING, WORKERS)], orders)
    load = _start_load(place, orders, directory)
    try:
        _publish(place, before)
        say("last act: Spark is starting")
        merging = False
        while not (_is_over(load, place, client, directory) and merging):
            crew.tend()
            if not merging and _count(place.engine, _CHUNKS):
                merging = True
                say("last act: loading the whole file beside the workers")
                _publish(place, beside)
            if time.monotonic() - begun > LONGEST_SECONDS:
                raise TxboxError(f"the last act has not come to an end in {LONGEST_SECONDS:g} s")
            time.sleep(LOOK_SECONDS)
        crew.stop()
    finally:
        load.kill()
        load.wait()
    return _reckon(place, directory, len(beside), seconds=time.monotonic() - begun)


def _parts(purchases: int) -> tuple[list[Purchase], list[Purchase]]:
    """Return purchases from all over the file: some from everywhere to go first, and the others."""
    chosen = list(islice(islice(read_purchases(), 0, None, TOTAL_PURCHASES // purchases), purchases))
    others = [purchase for number, purchase in enumerate(chosen) if number % BEFORE_THE_LOAD]
    return chosen[::BEFORE_THE_LOAD], others


def _publish(place: Place, purchases: Sequence[Purchase]) -> None:
    """Publish purchases in one transaction."""
    with place.engine.begin() as connection:
        Outbox().publish_many(
            connection,
            [
                Outgoing(place.purchases_url, one.as_json(), key=one.customer_id, message_id=one.event_id)
                for one in purchases
            ],
        )


def _start_load(place: Place, orders: Orders, directory: Path) -> "subprocess.Popen[bytes]":
    """Start `txbox bulk-load` on the whole file, as a person would."""
    events, effect = directory / "purchases.jsonl", directory / "account.sql"
    with events.open("w") as file:
        for purchase in read_purchases():
            file.write(f'{{"event_id":"{purchase.event_id}",{purchase.as_json()[1:]}\n')
    effect.write_text(APPLY)
    arguments = ["--subscriber", SUBSCRIBER, "--message-id", "event_id", "--fields", FIELDS, "--apply", str(effect)]
    arguments += ["--chunk-rows", str(CHUNK_ROWS), "--json"]
    here = {DATABASE_URL_VARIABLE: place.url.render_as_string(hide_password=False)}
    with _report(directory).open("wb") as report, _log(directory).open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "txbox_workers", "bulk-load", str(events), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=report,
            stderr=log,
            env={**os.environ, **orders.environment, **here},
            start_new_session=True,
        )


def _is_over(load: "subprocess.Popen[bytes]", place: Place, client: "SQSClient", directory: Path) -> bool:
    status = load.poll()
    if status:
        said = _log(directory).read_text(errors="replace").strip().splitlines()
        raise TxboxError(f"the bulk load ended with status {status}: {said[-1] if said else 'it said nothing'}")
    if status is None or _count(place.engine, _OUTBOX):
        return False
    return sum(queue_backlog(place.purchases_url, client=client).values()) == 0


def _reckon(place: Place, directory: Path, left: int, *, seconds: float) -> LastAct:
    outcomes = Counter(read_journals(directory, SUBSCRIBER).outcomes.values())
    with place.engine.connect() as connection:
        found = read_accounts(connection)
    return LastAct(
        load=json.loads(_report(directory).read_text()),
        processed_by_workers=outcomes[Outcome.PROCESSED],
        rejected_by_workers=outcomes[Outcome.DUPLICATE],
        left_for_workers=left,
        recorded=_count(place.engine, _RECORDED),
        comparison=compare(totals(read_purchases()), found),
        seconds=seconds,
    )


def _count(engine: Engine, statement: Any) -> int:
    with engine.connect() as connection:
        return int(connection.execute(statement).scalar_one())


def _report(directory: Path) -> Path:
    return directory / "bulk-load.json"


def _log(directory: Path) -> Path:
    return directory / "bulk-load.log"


_OUTBOX = text("SELECT count(*) FROM outbox_message")
_CHUNKS = text("SELECT count(*) FROM bulk_load_chunk")
_RECORDED = text("SELECT count(*) FROM processed_message WHERE dead_letter_id IS NULL")
