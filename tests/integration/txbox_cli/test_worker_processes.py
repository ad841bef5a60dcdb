"""``txbox worker --processes``: processes that are killed are replaced, none is left, and all are stopped as one."""

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from sqlalchemy import Engine

from support.aws.queues import send
from support.http import answer
from support.program import Running
from support.waiting import wait_until
from txbox_aws.sqs import queue_backlog

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

pytestmark = pytest.mark.chaos

MODULE = """
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
    (tmp_path / "billing.py").write_text(f"QUEUE = {queue!r}\n{MODULE}")
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
