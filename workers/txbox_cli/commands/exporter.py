"""``txbox exporter``: serve to Prometheus what the database knows and what waits in queues."""

import queue
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from txbox.extras import needs
from txbox.service import StopSignals, next_signal
from txbox_cli.monitoring_server import answering, line
from txbox_cli.options import DatabaseOptions, DatabaseTarget, checked_queues
from txbox_cli.signals import hangup_terminates

if TYPE_CHECKING:
    from sqlalchemy import Engine

QUEUES_SECONDS = 2.0
"""The queues' part of the limit. They are all asked at the same time."""


def exporter(
    db: DatabaseOptions,
    host: Annotated[
        str, typer.Option(help="Where to listen; 0.0.0.0 in a container, for others to reach it.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Of /metrics, /live and /ready; 0 is any free one.", min=0, max=65535)
    ] = 9187,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", help="The database is read so often, at most.", min=1, max=3600)
    ] = 15.0,
    limit: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="How long a scrape may take: less than Prometheus's scrape_timeout, which is 10 s unless it is set.",
            min=4,
            max=600,
        ),
    ] = 8.0,
    queue_url: Annotated[
        list[str] | None,
        typer.Option(
            "--queue",
            metavar="URL",
            help="Also how much waits in this queue, of SQS or scheme:rest. Repeatable.",
            callback=checked_queues,
        ),
    ] = None,
) -> None:
    """Serve what the database knows to Prometheus, until SIGTERM or Ctrl-C.

    Outbox, dead letters, workers and relays, pauses, leases, bulk loads, the runway of the inbox; with --queue, how
    many messages wait in a queue. One process is enough for a database. A scrape reads it with limited statements, once
    an interval at most; what is too much to be counted is a lower bound, and txbox_exporter_exact says so. What is not
    read within the limit is left out, and txbox_exporter_read_success says so. While the database is away,
    txbox_exporter_up is 0, and all else of it is missing.

    Its role needs SELECT on all tables, and pg_read_all_stats; of a queue it needs sqs:GetQueueAttributes. SQS does not
    say how old a queue's oldest message is: workers report that of what they receive
    (txbox_workers_received_age_seconds). There is no access control: keep the port inside.
    """
    wake: queue.SimpleQueue[signal.Signals | None] = queue.SimpleQueue()
    with (
        db.engine(pool_size=2, max_overflow=len(queue_url or ()), hide_parameters=True) as engine,
        hangup_terminates(),
        StopSignals(wake),
        exporting(
            db, engine, host, port, interval_seconds=interval, limit_seconds=limit, queues=queue_url or []
        ) as bound,
    ):
        shown = f"[{host}]" if ":" in host else host
        typer.echo(f"http://{shown}:{bound}/metrics reads {db.url.database}; Ctrl-C stops")
        next_signal(wake)


@contextmanager
def exporting(
    db: DatabaseTarget,
    engine: "Engine",
    host: str,
    port: int,
    *,
    interval_seconds: float,
    limit_seconds: float,
    queues: Sequence[str] = (),
) -> Iterator[int]:
    """Serve metrics and probes while entered. Yield the port."""
    with needs("prometheus"):
        from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

    from txbox.status.exporter.prometheus import DatabaseCollector

    registry = CollectorRegistry()
    collector = DatabaseCollector(
        engine,
        schema=db.schema,
        prefix=db.prefix,
        interval_seconds=interval_seconds,
        limit_seconds=limit_seconds - (QUEUES_SECONDS if queues else 0),
    )
    registry.register(collector)
    if queues:
        from txbox_cli.queue_collector import QueueCollector
        from txbox_workers.brokers import DatabasePlace

        place = DatabasePlace(engine, db.schema, db.prefix)
        registry.register(
            QueueCollector(queues, place, interval_seconds=interval_seconds, limit_seconds=QUEUES_SECONDS)
        )

    def ready() -> tuple[int, str, bytes]:
        if collector.database_answers():
            return line(200, "ready")
        return line(503, "not ready: the database cannot be used")

    answers = {
        "/metrics": lambda: (200, CONTENT_TYPE_LATEST, generate_latest(registry)),
        "/live": lambda: line(200, "live"),
        "/ready": ready,
    }
    with answering(host, port, answers) as bound:
        yield bound
