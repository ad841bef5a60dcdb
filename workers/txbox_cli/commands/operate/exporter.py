"""``txbox exporter``: what the database knows, for Prometheus."""

import queue
import signal
from typing import Annotated

import typer

from txbox.service import StopSignals
from txbox_cli.commands.operate.metrics_server import answering, line
from txbox_cli.options import DatabaseOptions
from txbox_cli.signals import hangup_terminates


def exporter(
    db: DatabaseOptions,
    host: Annotated[
        str, typer.Option(help="Where to listen; 0.0.0.0 in a container, for others to reach it.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Of /metrics and /live; 0 is any free one.", min=0, max=65535)] = 9187,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", help="The database is read so often, at most.", min=1, max=3600)
    ] = 15.0,
) -> None:
    """Serve what the database knows to Prometheus, until SIGTERM or Ctrl-C.

    Outbox, dead letters, workers and relays, pauses, leases, bulk loads, the runway of the inbox. One process is enough
    for a database. A scrape reads it with limited statements, once an interval at most; what is too much to be counted
    is a lower bound, and txbox_exporter_exact says so. While the database is away, txbox_exporter_up is 0, and all else
    is missing.

    Its role needs SELECT on all tables, and pg_read_all_stats. There is no access control: keep the port inside.
    """
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

    from txbox.status.exporter.prometheus import DatabaseCollector

    registry = CollectorRegistry()
    wake: queue.SimpleQueue[signal.Signals | None] = queue.SimpleQueue()
    with db.engine(pool_size=2, max_overflow=0, hide_parameters=True) as engine:
        registry.register(DatabaseCollector(engine, schema=db.schema, prefix=db.prefix, interval_seconds=interval))
        answers = {
            "/metrics": lambda: (200, CONTENT_TYPE_LATEST, generate_latest(registry)),
            "/live": lambda: line(200, "live"),
        }
        with hangup_terminates(), StopSignals(wake), answering(host, port, answers) as bound:
            shown = f"[{host}]" if ":" in host else host
            typer.echo(f"http://{shown}:{bound}/metrics reads {db.url.database}; Ctrl-C stops")
            wake.get()
