"""Health over HTTP: of services whose database goes and comes back, and of the commands that have a port for it."""

import contextlib
import os
import re
import signal
import socket
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url

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
from txbox_cli.options import Database
from txbox_local import LocalPostgres
from txbox_workers.memory_source import MemorySource

Txbox = Callable[..., Ended]
NOTICED_SECONDS = 15.0
"""A maintainer looks every 10 seconds, the others every 3 or sooner."""


def answer(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as found:
            return found.status, found.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


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
        database = Database(make_url(server.url), None, "")
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


@pytest.mark.parametrize("command", ["relay", "maintain"])
def test_a_command_answers_probes_from_its_start_to_its_end(txbox: Txbox, command: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    at = f"http://127.0.0.1:{port}"
    found: dict[str, int] = {}

    def is_ready() -> bool:
        with contextlib.suppress(OSError):  # it does not listen yet
            return answer(f"{at}/ready")[0] == 200
        return False

    def ask() -> None:
        try:
            wait_until(is_ready, timeout=30)
            found.update({path: answer(f"{at}/{path}")[0] for path in ("live", "ready", "metrics")})
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    prober = threading.Thread(target=ask)
    prober.start()
    ended = txbox(command, "--health-port", str(port))
    prober.join()
    assert found == {"live": 200, "ready": 200, "metrics": 200}
    assert ended.status == 0, ended.err
    assert f"health: http://127.0.0.1:{port} has /live, /ready, /metrics" in ended.out
