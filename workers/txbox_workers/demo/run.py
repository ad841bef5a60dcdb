"""The main job: publish, process, kill, and reckon."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import text

from txbox import TxboxError
from txbox.status import read_status
from txbox_workers.demo.accounting import Comparison, Deliveries, account_for, compare
from txbox_workers.demo.billing import SUBSCRIBER, read_accounts
from txbox_workers.demo.crew import Crew, Kills
from txbox_workers.demo.journal import read_journals
from txbox_workers.demo.last_act import LastAct, run_last_act
from txbox_workers.demo.place import Place, open_place
from txbox_workers.demo.publisher import Publisher, Sent
from txbox_workers.demo.purchases import read_purchases, totals
from txbox_workers.demo.worker_process import LOST_ACK_SHARE
from txbox_workers.settings import DATABASE_URL_VARIABLE, database_engine, database_url
from txbox_workers.sqs import MAX_BATCH, queue_backlog, sqs_client

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

__all__ = ["Plan", "Progress", "Report", "run_demo"]

VISIBILITY_SECONDS = 4
"""Short, so that what a killed worker held comes again soon."""

STALL_SECONDS = 90.0
"""Without any progress for that long, something is broken."""

LOOK_SECONDS = 0.1
"""Between looks at the workers."""


COUNT_PAUSE = 20
"""Between counts of what is processed, in times of what the last count took."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do.

    Attributes:
        purchases: how many of the file's.
        workers: processes at a time.
        kills: how many workers to kill.
        seed: of all random choices.
        database_url: a Postgres to use; None starts an embedded one.
        own_broker: start a local SQS; otherwise boto3's own settings lead to one.
        keep: leave schema and queue behind.
        last_act: have Spark load the whole file beside the workers, at the end.
    """

    purchases: int
    workers: int
    kills: int
    seed: int
    database_url: str | None = None
    own_broker: bool = True
    keep: bool = False
    last_act: bool = False


@dataclass(slots=True)
class Progress:
    """How far a run is; changed as it goes."""

    stage: str = "starting"
    sent: int = 0
    processed: int = 0
    kills: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """What a run has come to."""

    plan: Plan
    sent: Sent
    deliveries: Deliveries
    kills: Kills
    workers_started: int
    comparison: Comparison
    dead: int
    seconds: float
    schema: str
    queue_url: str
    last_act: LastAct | None = None

    @property
    def exact(self) -> bool:
        """Whether every customer is right to the cent and every delivery is accounted for, in the last act too."""
        well_ended = self.last_act is None or self.last_act.exact
        return self.comparison.exact and self.deliveries.adds_up and well_ended

    @property
    def duplicate_share(self) -> float:
        """Duplicates that reached the workers, as a share of the purchases."""
        return self.deliveries.duplicates / self.plan.purchases if self.plan.purchases else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return all figures as plain values; no URL, because one may hold a password."""
        return {
            "exact": self.exact,
            "purchases": self.plan.purchases,
            "customers": self.comparison.customers,
            "sent": {"messages": self.sent.messages, **asdict(self.sent)},
            "delivered": self.deliveries.received,
            "lost_ack_share": LOST_ACK_SHARE,
            "processed": self.deliveries.processed,
            "duplicates_rejected": self.deliveries.duplicates,
            "duplicate_share": round(self.duplicate_share, 4),
            "failed": self.deliveries.failed,
            "in_flight": self.deliveries.in_flight,
            "adds_up": self.deliveries.adds_up,
            "contradictions": list(self.deliveries.contradictions),
            "kills": {"total": self.kills.total, **asdict(self.kills)},
            "workers_started": self.workers_started,
            "dead": self.dead,
            "expected_dollars": _dollars(self.comparison.expected_cents),
            "found_dollars": _dollars(self.comparison.found_cents),
            "difference_dollars": _dollars(self.comparison.difference_cents),
            "wrong_customers": list(self.comparison.wrong[:100]),
            "seconds": round(self.seconds, 1),
            "seed": self.plan.seed,
            "last_act": self.last_act and self.last_act.as_dict(),
        }


def run_demo(plan: Plan, on_progress: Callable[[Progress], None] = lambda _: None) -> Report:
    """Run the main job.

    Args:
        plan: what to do.
        on_progress: called whenever it is further.

    Raises:
        TxboxError: it could not be run to its end, for a reason that the message gives.
    """
    progress = Progress()

    def say(**changes: Any) -> None:
        for name, value in changes.items():
            setattr(progress, name, value)
        on_progress(progress)

    say(stage="starting servers")
    with ExitStack() as cleanup:
        directory = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="txbox-demo-")))
        environment = {**os.environ, **_services(plan, cleanup)}
        with _aws_environment(environment):
            client = sqs_client("")
        cleanup.callback(client.close)
        url = database_url(environment[DATABASE_URL_VARIABLE])
        admin = database_engine(url)
        cleanup.callback(admin.dispose)
        say(stage="creating tables and queue")
        place = open_place(admin, url, client, cleanup, keep=plan.keep)
        crew = Crew(
            queue_url=place.queue_url,
            schema=place.schema,
            directory=directory,
            environment=environment,
            workers=plan.workers,
            kills=plan.kills,
            batches_per_life=max(1, plan.purchases // MAX_BATCH // max(1, round(plan.kills * _SPARE))),
            visibility_seconds=VISIBILITY_SECONDS,
            seed=plan.seed,
        )
        cleanup.callback(crew.kill)
        publisher = Publisher(
            client,
            place.queue_url,
            read_purchases(plan.purchases),
            seed=plan.seed,
            on_sent=lambda more: say(sent=progress.sent + more),
        )
        begun = time.monotonic()
        publisher.start()
        cleanup.callback(publisher.stop)
        say(stage="processing")
        _work(plan, crew, publisher, place, client, say)
        say(stage="draining")
        crew.stop()
        seconds = time.monotonic() - begun
        say(stage="reckoning")
        report = _reckon(plan, crew, publisher, place, directory, seconds=seconds)
        if not plan.last_act:
            return report
        backstage = directory / "last-act"
        backstage.mkdir()
        last_act = run_last_act(
            open_place(admin, url, client, cleanup, keep=plan.keep),
            client,
            environment,
            backstage,
            purchases=plan.purchases,
            seed=plan.seed,
            visibility_seconds=VISIBILITY_SECONDS,
            say=lambda stage: say(stage=stage),
        )
        return replace(report, last_act=last_act)


def _work(
    plan: Plan,
    crew: Crew,
    publisher: Publisher,
    place: Place,
    client: "SQSClient",
    say: Callable[..., None],
) -> None:
    """Tend the crew until everything is processed and the queue is empty."""
    processed, backlog, count_at = 0, -1, 0.0
    seen, last_change = (-1, -1, -1), time.monotonic()
    while True:
        crew.tend()
        if publisher.error is not None:
            raise TxboxError(f"publishing failed: {publisher.error}") from publisher.error
        now = time.monotonic()
        if now >= count_at:
            with place.engine.connect() as connection:
                processed = int(connection.execute(_COUNT).scalar_one())
            # Counting reads the whole inbox; however large that is, it gets a small share of the time.
            count_at = time.monotonic() + COUNT_PAUSE * (time.monotonic() - now)
        say(processed=processed, kills=crew.kills.total)
        if processed >= plan.purchases and publisher.done:
            backlog = sum(queue_backlog(place.queue_url, client=client).values())
            if not backlog:
                return
        if seen != (processed, crew.kills.total, backlog) or not publisher.done:
            seen, last_change = (processed, crew.kills.total, backlog), now
        elif now - last_change > STALL_SECONDS:
            raise TxboxError(
                f"no progress for {STALL_SECONDS:g} s at {processed} of {plan.purchases} purchases, "
                f"{max(backlog, 0)} messages left in the queue; "
                "run again with --url and --keep, and look with `txbox status` and `txbox dead-letters list`"
            )
        time.sleep(LOOK_SECONDS)


def _reckon(
    plan: Plan,
    crew: Crew,
    publisher: Publisher,
    place: Place,
    directory: Path,
    *,
    seconds: float,
) -> Report:
    with place.engine.connect() as connection:
        processed_ids = frozenset(connection.execute(_PROCESSED, {"subscriber": SUBSCRIBER}).scalars())
        found = read_accounts(connection)
    status = read_status(place.engine)
    return Report(
        plan=plan,
        sent=publisher.sent,
        deliveries=account_for(read_journals(directory), processed_ids),
        kills=crew.kills,
        workers_started=crew.started,
        comparison=compare(totals(read_purchases(plan.purchases)), found),
        dead=sum(sum(line.dead_letters.values()) for line in status.subscribers),
        seconds=seconds,
        schema=place.schema,
        queue_url=place.queue_url,
    )


def _services(plan: Plan, cleanup: ExitStack) -> dict[str, str]:
    """Start what is to be embedded, and return the variables that lead to everything."""
    environment: dict[str, str] = {}
    if plan.database_url is None:
        from txbox_workers.embedded import EmbeddedPostgres

        environment[DATABASE_URL_VARIABLE] = cleanup.enter_context(EmbeddedPostgres()).url
    else:
        environment[DATABASE_URL_VARIABLE] = plan.database_url
    if plan.own_broker:
        from txbox_workers.embedded import LocalAws

        environment.update(cleanup.enter_context(LocalAws()).environment())
    return environment


@contextmanager
def _aws_environment(environment: dict[str, str]) -> Iterator[None]:
    """Let boto3 in this process see the same variables as the workers."""
    before = dict(os.environ)
    os.environ.update({name: value for name, value in environment.items() if name.startswith("AWS_")})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _dollars(cents: int) -> str:
    return f"{cents // 100}.{cents % 100:02}"


_SPARE = 1.6
"""Lives are planned shorter than kills alone would have them, so that the work does not end before the kills."""

_COUNT = text("SELECT count(*) FROM processed_message")
_PROCESSED = text("SELECT message_id FROM processed_message WHERE subscriber_id = :subscriber")
