"""Processes that work under leases, which tests may kill and stop. Run it with its settings as JSON in one argument.

What it does it notes, a line each, in a file that it only appends to: what a process did is known even when it did not
live to tell, and without asking any ledger.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine

from support.processes import start_python
from txbox import InFlight, LeaseLost, Message
from txbox.instrumentation import Event, Settled
from txbox.leases import LEASE_SECONDS, Acquisition, Lease, Ledger, PostgresLedger, idempotent
from txbox.leases.lease import elapsed
from txbox_workers.coroutines import AsyncWorker
from txbox_workers.memory_source import MemorySource

EFFECT, COMPLETED, LOST = "effect", "completed", "lost"
READY, REFUSED, ALLOWED = "ready", "refused", "allowed"
FUNCTION, COROUTINE, WORKER = "function", "coroutine", "AsyncWorker"
CONCURRENCY = 3


@dataclass(frozen=True)
class Note:
    """A line of the file.

    Attributes:
        what: what was done.
        message: to which message.
        pid: by which process.
        fence, attempt, unknown: of its lease.
        noted_at, ends_at: readings of this machine's clock: now, and when its lease ends unless it is renewed.
    """

    what: str
    message: str
    pid: int
    fence: int = 0
    attempt: int = 0
    unknown: int = 0
    noted_at: float = 0.0
    ends_at: float = 0.0


def note(path: str | Path, what: str, message: str, lease: Lease | None = None) -> None:
    """Append a line, in one write: others append to the same file."""
    told: tuple[float, ...] = ()
    if lease is not None:
        now = elapsed()
        told = (lease.fence, lease.attempt, lease.unknown_attempts, now, now + lease.seconds_left)
    line = json.dumps([what, message, os.getpid(), *told]) + "\n"
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def notes(path: Path, what: str | None = None) -> list[Note]:
    """Read what was noted so far, in its order."""
    if not path.exists():
        return []
    lines = [Note(*json.loads(line)) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [each for each in lines if what in (None, each.what)]


def start(arguments: dict[str, str], path: Path, **settings: Any) -> subprocess.Popen[bytes]:
    """Start a process.

    Args:
        arguments: those of the ``Store``.
        path: of the file for notes.
        settings: ``messages`` are the ids to work through, until each of them is completed; ``lease`` is its length in
            seconds; ``pause`` is how long an effect takes at most, and twice what it takes at least, in seconds;
            ``moments`` says for an id what happens to its first attempt and when, such as
            ``["before effect", "SIGKILL"]``; ``style`` is ``FUNCTION`` (the default) or ``COROUTINE``, called through
            ``idempotent``, or ``WORKER``, an ``AsyncWorker`` with several coroutines at work; with ``steps``, the
            process does not work: it acquires the first message, stops, and then calls these methods of its ledger.
    """
    settings = {**arguments, "path": str(path), **settings}
    return start_python("-m", "support.txbox.lease_process", json.dumps(settings))


class NotedLedger:
    """A ledger whose completions are noted once they have succeeded, by whoever calls it."""

    def __init__(self, ledger: Ledger, settings: dict[str, Any]) -> None:
        self._ledger = ledger
        self._settings = settings
        self.subscriber_id = ledger.subscriber_id
        self.check, self.renew, self.release = ledger.check, ledger.renew, ledger.release

    def acquire(
        self, message_id: str, *, lease_seconds: float = LEASE_SECONDS, fingerprint: bytes | None = None
    ) -> Acquisition:
        return self._ledger.acquire(message_id, lease_seconds=lease_seconds, fingerprint=fingerprint)

    def complete(self, lease: Lease, result: bytes | None = None) -> None:
        at("before complete", lease, self._settings)
        self._ledger.complete(lease, result)
        note(self._settings["path"], COMPLETED, lease.message_id, lease)
        at("after complete", lease, self._settings)


def at(moment: str, lease: Lease, settings: dict[str, Any]) -> None:
    """Let happen what is to happen at this moment."""
    if lease.attempt == 1 and settings.get("moments", {}).get(lease.message_id, [""])[0] == moment:
        os.kill(os.getpid(), signal.Signals[settings["moments"][lease.message_id][1]])


def make_ledger(settings: dict[str, Any]) -> Ledger:
    """Make the ledger of the store that the settings name."""
    if settings["store"] == "postgres":
        return PostgresLedger("mailing", engine=create_engine(settings["url"], pool_size=2))
    from txbox_aws.dynamodb import DynamoDBLedger

    return DynamoDBLedger("mailing", table=settings["table"])


def work(settings: dict[str, Any]) -> None:
    """Work until every message is completed, by whomever."""
    path, pause, style = settings["path"], settings.get("pause", 0.0), settings.get("style", FUNCTION)
    ledger, lease_seconds = NotedLedger(make_ledger(settings), settings), settings["lease"]
    left = list(settings["messages"])
    random.shuffle(left)

    def begin(lease: Lease) -> float:
        at("before effect", lease, settings)
        note(path, EFFECT, lease.message_id, lease)
        return random.uniform(pause / 2, pause)

    def end(lease: Lease) -> str:
        at("after effect", lease, settings)
        return f"by {os.getpid()}"

    def handle(message: Message, lease: Lease) -> str:
        time.sleep(begin(lease))  # not a wait: work, so that a kill can land in it
        return end(lease)

    async def handle_in_loop(message: Message, lease: Lease) -> str:
        await asyncio.sleep(begin(lease))
        return end(lease)

    if style == WORKER:
        asyncio.run(work_off(left, path, ledger=ledger, handler=handle_in_loop, lease_seconds=lease_seconds))
        return
    once = idempotent(handle if style == FUNCTION else handle_in_loop, ledger=ledger, lease_seconds=lease_seconds)
    while left:
        for message_id in list(left):
            try:
                working = once(Message(message_id, b""))
                if style == COROUTINE:
                    asyncio.run(working)
            except InFlight:
                continue
            except LeaseLost:
                note(path, LOST, message_id)
            else:
                left.remove(message_id)
        time.sleep(0.05)  # not a wait either: the others need the processor too


async def work_off(message_ids: list[str], path: str, **options: Any) -> None:
    """Have an ``AsyncWorker`` work: it comes back to what others have in hand, and acks what is completed."""

    def note_loss(event: Event) -> None:
        if isinstance(event, Settled) and isinstance(event.error, LeaseLost):
            note(path, LOST, event.message_id)

    source = MemorySource([Message(message_id, b"") for message_id in message_ids])
    async with AsyncWorker(source, concurrency=CONCURRENCY, batch_size=1, hooks=[note_loss], **options):
        while not await asyncio.to_thread(source.wait_until_empty, 1.0):
            pass


def come_late(settings: dict[str, Any]) -> None:
    """Acquire a message, be stopped, and then try to go on as if nothing had happened."""
    ledger, message_id, path = make_ledger(settings), settings["messages"][0], settings["path"]
    lease = ledger.acquire(message_id, lease_seconds=settings["lease"]).lease
    assert lease is not None
    note(path, READY, message_id, lease)
    os.kill(os.getpid(), signal.SIGSTOP)
    for step in settings["steps"]:
        try:
            getattr(ledger, step)(lease)
        except LeaseLost:
            note(path, f"{REFUSED} {step}", message_id, lease)
        else:
            note(path, f"{ALLOWED} {step}", message_id, lease)


def main() -> None:
    """Do what the settings say."""
    settings = json.loads(sys.argv[1])
    (come_late if "steps" in settings else work)(settings)


if __name__ == "__main__":
    main()
