"""``txbox worker`` as one process and as several: they work, drain, are replaced, and can be ended at once."""

import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from sqlalchemy import Engine

from support.aws.queues import send
from support.http import answer
from support.program import PASSWORD, Ended, Running, own_module
from support.waiting import wait_until
from txbox_aws.sqs import queue_backlog

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

pytestmark = pytest.mark.chaos

Txbox = Callable[..., Ended]

MODULE = """
import logging, os
from pathlib import Path
from sqlalchemy import create_engine
from txbox import Inbox
from sqlalchemy.ext.asyncio import create_async_engine
from txbox import AsyncInbox
from txbox_aws.sqs import AsyncSqsWorker, SqsWorker

engine = create_engine(os.environ["TXBOX_DATABASE_URL"])
gate = Path(__file__).with_name("gate")

def handler(session, message):
    if message.id == "bad":
        raise ValueError("no stock at postgresql://u:hunter2@h/x")
    logging.getLogger("billing").info("at work on %s", message.id)
    if message.id == "slow":
        with gate.open() as opened:  # a named pipe: this waits until the test opens it too
            opened.readline()

def make(**changes):
    arguments = dict(inbox=Inbox("billing"), engine=engine, handler=handler, wait_seconds=1) | changes
    return SqsWorker(QUEUE, **arguments)

async def coroutine(session, message):
    import asyncio
    await session.run_sync(lambda _: logging.getLogger("billing").info("at work on %s", message.id))
    while message.id == "slow" and not gate.with_name("opened").exists():
        await asyncio.sleep(0.01)

def asynchronous():
    engine = create_async_engine(os.environ["TXBOX_DATABASE_URL"])
    return AsyncSqsWorker(QUEUE, inbox=AsyncInbox("billing"), engine=engine, handler=coroutine, wait_seconds=1)

worker = make()
no_table = make(inbox=Inbox("billing", prefix="other_"))
wrong_password = make(engine=create_engine(engine.url.set(password="hunter2")))
no_queue = SqsWorker(QUEUE + "-not", inbox=Inbox("billing"), engine=engine, handler=handler)

def malformed_queue():
    return SqsWorker("orders", inbox=Inbox("billing"), engine=engine, handler=handler)
"""


@pytest.fixture
def directory(tmp_path: Path, queue: str, schema_url: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TXBOX_DATABASE_URL", schema_url)
    (tmp_path / "billing.py").write_text(f"QUEUE = {queue!r}\n{MODULE}")
    os.mkfifo(tmp_path / "gate")
    return tmp_path


def processed(engine: Engine) -> set[str]:
    with engine.connect() as connection:
        return set(connection.exec_driver_sql("SELECT message_id FROM processed_message").scalars())


def test_it_processes_and_drains_on_sigterm(directory: Path, engine: Engine, queue: str, sqs: "SQSClient") -> None:
    send(sqs, queue, ["a", "b", "a"])
    with Running("worker", "billing:worker", cwd=directory) as running:
        running.says(f"billing works on {queue}; Ctrl-C drains and stops")
        wait_until(lambda: processed(engine) == {"a", "b"} and not any(queue_backlog(queue).values()))
        running.signal(signal.SIGTERM)
        assert running.wait() == 0
    assert running.out[-1] == "stopped: 1 duplicate, 2 processed\n"
    assert running.err == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_coroutines_that_were_begun_are_finished(
    number: signal.Signals, directory: Path, engine: Engine, queue: str, sqs: "SQSClient"
) -> None:
    arguments = ("--log-level", "info", "worker", "billing:asynchronous", "--health-port", "0")
    with Running(*arguments, cwd=directory) as running:
        send(sqs, queue, ["a", "slow", "a"])
        running.says("INFO billing: at work on slow")
        running.signal(number)
        running.says(f"{number.name}: finishing what was begun")
        (directory / "opened").touch()
        assert running.wait() == 0
    assert processed(engine) == {"a", "slow"}
    assert running.out[-1].startswith("stopped: ")


def test_a_second_signal_ends_coroutines_at_once(directory: Path, engine: Engine, queue: str, sqs: "SQSClient") -> None:
    with Running("--log-level", "info", "worker", "billing:asynchronous", cwd=directory) as running:
        send(sqs, queue, ["slow"])
        running.says("INFO billing: at work on slow")
        running.signal(signal.SIGTERM)
        running.says("finishing what was begun")
        running.signal(signal.SIGTERM)
        assert running.wait(timeout=10) == -signal.SIGTERM
    assert processed(engine) == set()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_was_begun_is_finished_and_it_answers_probes_until_its_end(
    number: signal.Signals, directory: Path, engine: Engine, queue: str, sqs: "SQSClient"
) -> None:
    arguments = ("--log-level", "info", "worker", "billing:worker", "--health-port", "0")
    with Running(*arguments, cwd=directory) as running:
        send(sqs, queue, ["a", "slow"])
        running.says("at work on slow")
        found = re.search(r"health: (\S+) has /live, /ready, /metrics", "".join(running.out))
        assert found is not None
        at = found[1]
        assert answer(f"{at}/live") == (200, "live\n")
        assert answer(f"{at}/ready") == (200, "ready\n")
        assert answer(f"{at}/metrics")[0] == 200
        assert 'txbox_broker_up{subscriber="billing"} 1.0' in answer(f"{at}/metrics")[1]
        running.signal(number)
        running.says(f"{number.name}: finishing what was begun")
        wait_until(lambda: answer(f"{at}/ready") == (503, "not ready: it is stopping\n"))
        assert answer(f"{at}/live") == (200, "live\n")
        with (directory / "gate").open("r+b", buffering=0) as gate:
            gate.write(b"go on\n")
            assert running.wait() == 0
    assert processed(engine) == {"a", "slow"}


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)])
def test_a_second_signal_ends_it_at_once(
    number: signal.Signals,
    status: int,
    directory: Path,
    engine: Engine,
    queue: str,
    sqs: "SQSClient",
) -> None:
    with Running("--log-level", "INFO", "worker", "billing:worker", cwd=directory) as running:
        send(sqs, queue, ["slow"])
        running.says("at work on slow")
        running.signal(number)
        running.says("finishing what was begun")
        running.signal(number)
        assert running.wait(timeout=10) == status
    assert processed(engine) == set()


def test_a_drain_that_takes_too_long_is_a_failure(directory: Path, queue: str, sqs: "SQSClient") -> None:
    arguments = ("worker", "billing:worker", "--log-level", "INFO", "--stop-seconds", "0.2")
    with Running(*arguments, cwd=directory) as running:
        send(sqs, queue, ["slow"])
        running.says("at work on slow")
        running.signal(signal.SIGTERM)
        assert running.wait() == 1
    assert running.err[-1] == "txbox: not drained within 0.2 s; the rest will be delivered again\n"


def test_log_lines_show_no_password_and_no_bodies(directory: Path, queue: str, sqs: "SQSClient") -> None:
    with Running("--log-level", "DEBUG", "worker", "billing:worker", cwd=directory) as running:
        send(sqs, queue, ["bad"])
        running.says(
            "WARNING txbox.worker: billing failed bad (delivery 1): ValueError: no stock at postgresql://u:***@h/x"
        )
        running.signal(signal.SIGTERM)
        assert running.wait() == 0
    assert PASSWORD not in "".join(running.err)
    assert "Authorization" not in "".join(running.err)


@pytest.mark.parametrize(
    ("name", "fragment"),
    [
        ("no_table", "table other_processed_message does not exist; create it with `txbox db upgrade`"),
        ("wrong_password", "correct the user or the password in the URL"),
        ("no_queue", "create the queue, or correct its URL, region or account"),
        ("malformed_queue", "SqsWorker.queue_url must be the URL of a queue, not 'orders'"),
    ],
)
def test_a_worker_that_cannot_start_is_one_line(
    name: str, fragment: str, directory: Path, txbox: Txbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_module(monkeypatch, directory, "billing")
    try:
        txbox("worker", f"billing:{name}").failed_in_one_line(1, fragment)
        txbox("worker", f"billing:{name}", "--debug").failed_with_traceback(1, fragment)
    finally:
        sys.modules["billing"].engine.dispose()


OF_PROCESSES = """
import os, time
from pathlib import Path
from sqlalchemy import create_engine, text
from txbox import Inbox
from txbox_aws.sqs import SqsWorker

def handler(session, message):
    session.execute(text("INSERT INTO effect VALUES (:id)"), {"id": message.id})
    print("at", "work", "on", message.id, os.getpid(), flush=True)
    while not Path(message.id).exists():
        time.sleep(0.01)

worker = SqsWorker(
    QUEUE, inbox=Inbox("billing"), engine=create_engine(os.environ["TXBOX_DATABASE_URL"]), handler=handler,
    wait_seconds=1, visibility_seconds=2, batch_size=1,
)
"""


@pytest.fixture
def running(
    tmp_path: Path, queue: str, schema_url: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Running]:
    """Two processes at work."""
    monkeypatch.setenv("TXBOX_DATABASE_URL", schema_url)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE effect (message_id text)")
    (tmp_path / "billing.py").write_text(f"QUEUE = {queue!r}\n{OF_PROCESSES}")
    with Running("worker", "billing:worker", "--processes", "2", "--health-port", "0", cwd=tmp_path) as running:
        running.says(f"billing works on {queue} in 2 processes; Ctrl-C drains and stops")
        started = members(running)
        yield running
    for process in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()  # only where a test has failed


def effects(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.exec_driver_sql("SELECT message_id FROM effect ORDER BY 1").scalars())


def members(running: Running) -> list[psutil.Process]:
    return psutil.Process(running.process.pid).children()


def hold_two(running: Running, queue: str, sqs: "SQSClient") -> dict[str, int]:
    """Have each process hold a message, until there is a file of its name; return the process of each message."""
    send(sqs, queue, ["1", "2"])
    running.says("at work on 1")
    running.says("at work on 2")
    return {one: int(pid) for one, pid in re.findall(r"at work on (\d) (\d+)\n", "".join(running.out))}


def health_at(running: Running) -> str:
    found = re.search(r"health: (\S+) has /live, /ready\n", "".join(running.out))
    assert found is not None
    return found[1]


def is_stopping(running: Running) -> bool:
    return answer(f"{health_at(running)}/ready") == (503, "not ready: it is stopping\n")


def test_one_that_is_killed_is_replaced_and_nothing_is_lost_or_doubled(
    running: Running, tmp_path: Path, engine: Engine, queue: str, sqs: "SQSClient"
) -> None:
    at = health_at(running)
    held = hold_two(running, queue, sqs)
    assert len(set(held.values())) == 2
    assert answer(f"{at}/ready") == (200, "ready\n")
    os.kill(held["1"], signal.SIGKILL)
    (tmp_path / "1").touch()
    running.says(f"process {held['1']} ended by SIGKILL; another one takes its place\n")
    assert answer(f"{at}/live") == (200, "live\n")
    wait_until(lambda: answer(f"{at}/ready") == (200, "ready\n"))
    wait_until(lambda: effects(engine) == ["1"])
    running.signal(signal.SIGTERM)
    wait_until(lambda: is_stopping(running))
    (tmp_path / "2").touch()
    assert running.wait() == 0
    assert effects(engine) == ["1", "2"]
    assert running.out[-1] == "stopped: 2 processed\n"
    assert not any(queue_backlog(queue).values())


def test_all_end_with_a_supervisor_that_is_killed(
    running: Running, tmp_path: Path, engine: Engine, queue: str, sqs: "SQSClient"
) -> None:
    processes = members(running)
    assert len(processes) == 2
    hold_two(running, queue, sqs)
    running.signal(signal.SIGKILL)
    running.process.wait()
    for one in ("1", "2"):  # they drain: what they had begun is finished
        (tmp_path / one).touch()
    assert psutil.wait_procs(processes, timeout=30)[1] == []
    assert effects(engine) == ["1", "2"]


def test_a_second_signal_ends_all_at_once(running: Running, engine: Engine, queue: str, sqs: "SQSClient") -> None:
    processes = members(running)
    hold_two(running, queue, sqs)
    running.signal(signal.SIGTERM)
    wait_until(lambda: is_stopping(running))
    running.signal(signal.SIGTERM)
    assert running.wait(timeout=10) == -signal.SIGTERM
    assert psutil.wait_procs(processes, timeout=10)[1] == []
    assert effects(engine) == []
