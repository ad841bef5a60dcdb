"""Health and metrics over HTTP: of services whose database goes and comes back, of commands, and of queues."""

import contextlib
import http.client
import os
import re
import signal
import socket
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import create_engine, make_url

from support.aws.queues import send
from support.http import answer
from support.program import Ended
from support.txbox.publishers import RecordingPublisher
from support.waiting import wait_until
from support.workers.memory_worker import at_work, make
from txbox import BrokerError
from txbox.maintenance import Maintainer
from txbox.relay import Relay
from txbox.schema import tables
from txbox.service import Service
from txbox_aws.broker import SqsQueue
from txbox_cli.commands.exporter import exporting
from txbox_cli.errors import CommandFailed
from txbox_cli.health import health_of
from txbox_cli.monitoring_server import (
    CONNECTIONS,
    REQUEST_SECONDS,
    WAIT_SECONDS,
    answering,
    line,
)
from txbox_cli.options import DatabaseTarget
from txbox_cli.queue_collector import QueueCollector
from txbox_local import LocalPostgres
from txbox_workers.brokers import DatabasePlace
from txbox_workers.memory_source import MemorySource

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

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


def test_it_answers_what_it_has_and_names_it_otherwise() -> None:
    with answering("127.0.0.1", 0, {"/live": lambda: line(200, "live")}) as port:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/live?x=1", timeout=10) as answer:
            assert answer.read() == b"live\n"
        with pytest.raises(urllib.error.HTTPError, match="404") as raised:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/other", timeout=10)
        raised.value.close()
        with pytest.raises(CommandFailed, match="choose another --port"), answering("127.0.0.1", port, {}):
            pass


def test_clients_that_send_nothing_keep_no_probe_waiting() -> None:
    with answering("127.0.0.1", 0, {"/live": lambda: line(200, "live")}) as port, ExitStack() as opened:
        silent = [opened.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(CONNECTIONS)]
        silent[0].sendall(b"GET /live HTTP/1.1\r\n")  # and then nothing
        began = time.monotonic()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/live", timeout=10) as answer:
            assert answer.read() == b"live\n"
        assert time.monotonic() - began < WAIT_SECONDS
        for one in silent:
            one.settimeout(10)
        assert silent[0].recv(1) == b"", "the first that asked has made room"
        assert silent[1].recv(1) == b"", "and the others are not waited for"
        assert WAIT_SECONDS < time.monotonic() - began < 2 * REQUEST_SECONDS


def test_connections_beyond_the_bound_are_closed_while_all_others_are_answered() -> None:
    go_on, begun = threading.Event(), threading.Semaphore(0)

    def slow() -> tuple[int, str, bytes]:
        begun.release()
        go_on.wait(30)
        return line(200, "slow")

    with answering("127.0.0.1", 0, {"/slow": slow}) as port, ThreadPoolExecutor(CONNECTIONS) as pool:
        url = f"http://127.0.0.1:{port}/slow"

        def ask() -> bytes:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return answer.read()

        answers = [pool.submit(ask) for _ in range(CONNECTIONS)]
        try:
            assert all(begun.acquire(timeout=20) for _ in range(CONNECTIONS))
            with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
                ask()
        finally:
            go_on.set()
        assert {one.result() for one in answers} == {b"slow\n"}


def registry_of(*queues: str, limit_seconds: float = 20.0) -> CollectorRegistry:
    registry = CollectorRegistry()
    place = DatabasePlace(create_engine("postgresql+psycopg://"))  # SQS needs no database
    registry.register(QueueCollector(queues, place, interval_seconds=1e-9, limit_seconds=limit_seconds))
    return registry


def up(registry: CollectorRegistry, queue: str) -> float | None:
    return registry.get_sample_value("txbox_queue_up", {"source": queue})


def waiting(registry: CollectorRegistry, queue: str) -> float | None:
    return registry.get_sample_value("txbox_queue_messages", {"source": queue, "state": "waiting"})


def test_each_queue_says_how_much_it_holds_and_one_that_cannot_says_nothing(
    make_queue: Callable[..., str], sqs: "SQSClient", caplog: pytest.LogCaptureFixture
) -> None:
    full, empty = make_queue(), make_queue()
    send(sqs, full, ["a", "b"])
    missing = f"{empty}-not"
    registry = registry_of(full, empty, missing)
    assert [waiting(registry, one) for one in (full, empty, missing)] == [2, 0, None]
    assert [up(registry, one) for one in (full, empty, missing)] == [1, 1, 0]
    assert caplog.text.count(f"what waits in {missing} is not known: SQS refused GetQueueAttributes") == 1


def test_a_queue_that_gives_no_answer_keeps_the_others_not_waiting(
    make_queue: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, hanging, go_on = make_queue(), make_queue(), threading.Event()
    asked, real = [], SqsQueue.backlog

    def backlog(queue: SqsQueue) -> Mapping[str, int]:
        asked.append(queue._url)
        if queue._url == hanging and not go_on.wait(30):
            raise BrokerError("never")
        return real(queue)

    monkeypatch.setattr(SqsQueue, "backlog", backlog)
    registry = registry_of(answers, hanging, limit_seconds=1.0)
    for _ in range(2):
        began = time.monotonic()
        list(registry.collect())
        assert time.monotonic() - began < 3
    assert asked.count(hanging) == 1, "not once more while it hangs"
    assert (up(registry, answers), up(registry, hanging)) == (1, 0)
    go_on.set()
    wait_until(lambda: up(registry, hanging) == 1)
