"""Health over HTTP: of services whose database goes and comes back, and of the commands that have a port for it."""

import contextlib
import os
import re
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url

from support.http import answer
from support.program import Ended
from support.txbox.publishers import RecordingPublisher
from support.waiting import wait_until
from support.workers.memory_worker import at_work, make
from txbox.maintenance import Maintainer
from txbox.relay import Relay
from txbox.schema import tables
from txbox.service import Service
from txbox_cli.commands.operate.exporter import exporting
from txbox_cli.commands.operate.health import health_of
from txbox_cli.options import DatabaseTarget
from txbox_local import LocalPostgres
from txbox_workers.memory_source import MemorySource

Txbox = Callable[..., Ended]
NOTICED_SECONDS = 15.0
"""A maintainer looks every 10 seconds, the others every 3 or sooner."""


@pytest.fixture
def server() -> Iterator[LocalPostgres]:
    """A server that may be stopped, and is the same one when it is started again."""
    # Not pytest's folder: where root runs the tests, another user runs the server, and pytest locks others out.
    with tempfile.TemporaryDirectory(prefix="txbox-health-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o711)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        with LocalPostgres(Path(folder) / "server", port=port, durable=False) as server:
            yield server


def test_all_notice_an_outage_and_its_end(server: LocalPostgres, capsys: pytest.CaptureFixture[str]) -> None:
    engine = create_engine(server.url, pool_size=20)
    tables().metadata.create_all(engine)
    services: dict[str, Service] = {
        "worker": make(MemorySource(), engine),
        "relay": Relay(engine, {"own": RecordingPublisher()}),
        "maintainer": Maintainer(engine, interval_seconds=1.0),
    }
    at: dict[str, str] = {}
    with ExitStack() as entered:
        started = [entered.enter_context(health_of(one, "127.0.0.1", 0)) for one in services.values()]
        at.update(zip(services, re.findall(r"health: (\S+) has", capsys.readouterr().out), strict=True))
        database = DatabaseTarget(make_url(server.url), None, "")
        bound = exporting(database, engine, "127.0.0.1", 0, interval_seconds=1.0, limit_seconds=4.0)
        at["exporter"] = f"http://127.0.0.1:{entered.enter_context(bound)}"
        assert answer(f"{at['worker']}/ready") == (503, "not ready: it has not started yet\n")
        entered.enter_context(at_work(*services.values()))
        for healthy in started:
            healthy()

        def statuses(path: str) -> dict[str, int]:
            return {name: answer(f"{url}/{path}")[0] for name, url in at.items()}

        everywhere = dict.fromkeys(at, 200)
        assert statuses("ready") == everywhere
        assert "txbox_exporter_up 1.0" in answer(f"{at['exporter']}/metrics")[1]

        server.stop()
        wait_until(lambda: statuses("ready") == dict.fromkeys(at, 503), "all are not ready", timeout=NOTICED_SECONDS)
        assert answer(f"{at['worker']}/ready")[1] == "not ready: the database cannot be used\n"
        assert statuses("live") == everywhere
        wait_until(lambda: "txbox_exporter_up 0.0" in answer(f"{at['exporter']}/metrics")[1], timeout=NOTICED_SECONDS)
        assert "txbox_outbox" not in re.sub("#.*", "", answer(f"{at['exporter']}/metrics")[1])

        server.start()
        wait_until(lambda: statuses("ready") == everywhere, "all are ready", timeout=2 * NOTICED_SECONDS)
        wait_until(lambda: "txbox_exporter_up 1.0" in answer(f"{at['exporter']}/metrics")[1], timeout=NOTICED_SECONDS)
    engine.dispose()


def probed(txbox: Txbox, *command: str) -> tuple[dict[str, str], Ended]:
    """Run a command on a free port until it is ready; return what it answers then, by path, and how it ended."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    at = f"http://127.0.0.1:{port}"
    found: dict[str, str] = {}
    over = threading.Event()

    def is_ready() -> bool:
        with contextlib.suppress(OSError):  # it does not listen yet
            return answer(f"{at}/ready")[0] == 200
        return False

    def ask() -> None:
        try:
            wait_until(lambda: over.is_set() or is_ready(), timeout=30)
            found.update({path: answer(f"{at}/{path}")[1] for path in ("live", "ready", "metrics")})
        finally:
            if not over.is_set():  # or this would end the tests
                os.kill(os.getpid(), signal.SIGTERM)

    prober = threading.Thread(target=ask)
    prober.start()
    try:
        ended = txbox(*command, port)
    finally:
        over.set()
        prober.join()
    assert ended.status == 0, ended.err
    assert at in ended.out
    return found, ended


@pytest.mark.parametrize("command", ["relay", "maintain"])
def test_a_command_answers_probes_from_its_start_to_its_end(txbox: Txbox, command: str) -> None:
    found, ended = probed(txbox, command, "--health-port")
    assert (found["live"], found["ready"]) == ("live\n", "ready\n")
    assert "# HELP txbox_database_up" in found["metrics"]
    assert "has /live, /ready, /metrics" in ended.out


def test_the_exporter_has_figures_of_the_database_and_of_queues(txbox: Txbox, queue: str) -> None:
    found, _ = probed(txbox, "exporter", "--queue", queue, "--queue", queue, "--limit", "30", "--port")
    assert (found["live"], found["ready"]) == ("live\n", "ready\n")
    assert "txbox_exporter_up 1.0" in found["metrics"]
    assert f'txbox_queue_messages{{source="{queue}",state="waiting"}} 0.0' in found["metrics"]


def test_a_queue_of_the_exporter_is_a_url(txbox: Txbox) -> None:
    txbox("exporter", "--queue", "orders").failed_in_one_line(2, "--queue must be the URL of a queue")
