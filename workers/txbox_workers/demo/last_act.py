"""The last act: Spark loads the whole file while the workers are still busy with a part of it.

Both roads lead through one inbox, so it does not matter who comes first. The workers' purchases are taken from all over
the file. A third of them are sent before the load has merged its first chunk, and the rest while it goes on: some are
processed by the workers and found by the load, others the other way round.
"""

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Engine, text

from txbox import Outcome, TxboxError
from txbox_workers.demo.accounting import Comparison, compare
from txbox_workers.demo.billing import SUBSCRIBER, read_accounts
from txbox_workers.demo.crew import Crew
from txbox_workers.demo.journal import read_journals
from txbox_workers.demo.place import Place
from txbox_workers.demo.publisher import Publisher
from txbox_workers.demo.purchases import TOTAL_PURCHASES, Purchase, read_purchases, totals
from txbox_workers.settings import DATABASE_URL_VARIABLE
from txbox_workers.sqs import queue_backlog

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

__all__ = ["LastAct", "run_last_act"]

BEFORE_THE_LOAD = 3
"""One of so many messages is sent before the load has merged a chunk."""

WORKERS = 2

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
        left_for_workers: messages not sent when the load had merged its first chunk.
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
    place: Place,
    client: "SQSClient",
    environment: dict[str, str],
    directory: Path,
    *,
    purchases: int,
    seed: int,
    visibility_seconds: int,
    say: Callable[[str], None],
) -> LastAct:
    """Load the whole file while workers process a part of it.

    Args:
        place: where.
        client: an SQS client of boto3.
        environment: of the processes.
        directory: for files, journals and logs; empty.
        purchases: how many go to the workers.
        seed: of the random choices.
        visibility_seconds: how long a delivery is a worker's.
        say: is told what happens.

    Raises:
        TxboxError: the load failed, or nothing comes to an end.
    """
    begun = time.monotonic()
    merging = threading.Event()
    left = purchases - len(range(0, purchases, BEFORE_THE_LOAD))
    publisher = Publisher(client, place.queue_url, _gated(purchases, merging), seed=seed, on_sent=lambda _: None)
    crew = Crew(
        queue_url=place.queue_url,
        schema=place.schema,
        directory=directory,
        environment=environment,
        workers=WORKERS,
        kills=0,
        batches_per_life=1,
        visibility_seconds=visibility_seconds,
        seed=seed,
    )
    load = _start_load(place, environment, directory)
    try:
        publisher.start()
        say("last act: Spark is starting")
        while not _is_over(load, publisher, place, client, directory):
            crew.tend()
            if not merging.is_set() and _count(place.engine, _CHUNKS):
                merging.set()
                say("last act: loading the whole file beside the workers")
            if publisher.error is not None:
                raise TxboxError(f"publishing failed: {publisher.error}") from publisher.error
            if time.monotonic() - begun > LONGEST_SECONDS:
                raise TxboxError(f"the last act has not come to an end in {LONGEST_SECONDS:g} s")
            time.sleep(LOOK_SECONDS)
        crew.stop()
    finally:
        merging.set()
        publisher.stop()
        crew.kill()
        load.kill()
        load.wait()
    return _reckon(place, directory, left, seconds=time.monotonic() - begun)


def _gated(purchases: int, gate: threading.Event) -> Iterator[Purchase]:
    """Give purchases from all over the file: some from everywhere at once, and the others when the gate opens."""
    chosen = list(islice(islice(read_purchases(), 0, None, TOTAL_PURCHASES // purchases), purchases))
    yield from chosen[::BEFORE_THE_LOAD]
    gate.wait()
    yield from (purchase for number, purchase in enumerate(chosen) if number % BEFORE_THE_LOAD)


def _start_load(place: Place, environment: dict[str, str], directory: Path) -> "subprocess.Popen[bytes]":
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
            env={**environment, **here},
            start_new_session=True,
        )


def _is_over(
    load: "subprocess.Popen[bytes]", publisher: Publisher, place: Place, client: "SQSClient", directory: Path
) -> bool:
    status = load.poll()
    if status:
        said = _log(directory).read_text(errors="replace").strip().splitlines()
        raise TxboxError(f"the bulk load ended with status {status}: {said[-1] if said else 'it said nothing'}")
    if status is None or not publisher.done:
        return False
    return sum(queue_backlog(place.queue_url, client=client).values()) == 0


def _reckon(place: Place, directory: Path, left: int, *, seconds: float) -> LastAct:
    outcomes = Counter(read_journals(directory).outcomes.values())
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


_CHUNKS = text("SELECT count(*) FROM bulk_load_chunk")
_RECORDED = text("SELECT count(*) FROM processed_message")
