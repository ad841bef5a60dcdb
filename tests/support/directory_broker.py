"""A broker that is a directory: each message a file. It stands for a package of others, and knows our ports alone.

A file is named SEQUENCE.COUNT, which is its receipt: how often it was delivered. It is due at the time of its last
change. Its first line has id, key and headers as JSON; the rest is the body.
"""

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Unpack

from txbox import BrokerError, DeadLetter, InvalidConfiguration, Message
from txbox.relay import OutboxMessage, PartlySent, Refused
from txbox_workers.brokers import DatabasePlace
from txbox_workers.delivery import Delivery, Settlement
from txbox_workers.options import WorkerOptions
from txbox_workers.worker import Worker

MAX_BYTES = 1_000_000


def folder_of(name: str) -> Path:
    scheme, _, path = name.partition(":")
    if scheme != "dir" or not path.startswith("/"):
        raise InvalidConfiguration(f"{name!r} is not dir:/PATH")
    return Path(path)


@contextmanager
def translated(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BrokerError(f"{name}: {error.strerror}", permanent=isinstance(error, FileNotFoundError)) from error


def write(name: str, id_: str, body: bytes, headers: Mapping[str, str]) -> None:
    folder, sequence = folder_of(name), f"{time.time_ns():020}-{next(_numbers)}"
    with translated(name):
        (folder / f".{sequence}").write_bytes(json.dumps([id_, dict(headers)]).encode() + b"\n" + body)
        (folder / f".{sequence}").rename(folder / f"{sequence}.0")


class DirectorySource:
    def __init__(self, name: str, *, visibility_seconds: float = 30, batch_size: int = 10) -> None:
        self.name, self.visibility_seconds, self._batch_size = name, visibility_seconds, batch_size
        self._folder, self._closed = folder_of(name), threading.Event()

    def open(self) -> None:
        with translated(self.name):
            next(self._folder.iterdir(), None)

    def receive(self) -> Sequence[Delivery]:
        end = time.monotonic() + 0.5
        while not (found := list(itertools.islice(self._taken(), self._batch_size))) and time.monotonic() < end:
            self._closed.wait(0.02)
        return found

    def _taken(self) -> Iterator[Delivery]:
        with translated(self.name):
            paths = sorted(path for path in self._folder.iterdir() if path.name[0] != ".")
        for path in paths:
            sequence, count = path.name.split(".")
            taken = path.with_name(f"{sequence}.{int(count) + 1}")
            with suppress(FileNotFoundError):  # another one was quicker
                if path.stat().st_mtime <= time.time():
                    self._set_due(path, self.visibility_seconds)
                    path.rename(taken)
                    head, _, body = taken.read_bytes().partition(b"\n")
                    id_, headers = json.loads(head)
                    yield Delivery(Message(id_, body, headers, self.name), taken.name, int(count) + 1, body=body)

    def ack(self, deliveries: Sequence[Delivery]) -> Collection[str]:
        return [one.receipt for one in deliveries if self._is_ours(one, Path.unlink)]

    def hand_back(self, settlements: Sequence[Settlement]) -> None:
        for one in settlements:
            self._is_ours(one.delivery, lambda path, seconds=one.delay_seconds: self._set_due(path, seconds))

    def extend_visibility(self, deliveries: Sequence[Delivery], seconds: float) -> Mapping[str, str]:
        refused = [one for one in deliveries if not self._is_ours(one, lambda path: self._set_due(path, seconds))]
        return {one.receipt: "it was delivered again" for one in refused}

    def close(self) -> None:
        self._closed.set()

    def _is_ours(self, delivery: Delivery, change: Callable[[Path], object]) -> bool:
        with suppress(FileNotFoundError):
            change(self._folder / delivery.receipt)
            return True
        return False

    def _set_due(self, path: Path, seconds: float) -> None:
        os.utime(path, (time.time(), time.time() + seconds))


class DirectoryPublisher:
    def send(self, messages: Sequence[OutboxMessage]) -> Sequence[Refused]:
        refused = []
        for number, one in enumerate(messages):
            if len(one.body) > MAX_BYTES:
                refused.append(Refused(one, f"{len(one.body):,} bytes are too many", final=True))
                continue
            try:
                write(one.destination, one.id, one.body, {**one.headers, **({"key": one.key} if one.key else {})})
            except BrokerError as error:
                raise PartlySent(str(error), unsent=messages[number:], refused=refused) from error
        return refused


class DirectoryQueue:
    def __init__(self, name: str) -> None:
        self._name, self._folder = name, folder_of(name)

    def backlog(self) -> Mapping[str, int]:
        with translated(self._name):
            due = [path.stat().st_mtime for path in self._folder.iterdir()]
        return {"waiting": sum(at <= time.time() for at in due), "delivered": sum(at > time.time() for at in due)}

    def send_back(self, letter: DeadLetter) -> None:
        write(self._name, letter.message_id, letter.body, letter.headers)

    def close(self) -> None:
        pass


class DirectoryBroker:
    """What the entry point names."""

    def queue(self, name: str, place: DatabasePlace) -> DirectoryQueue:
        return DirectoryQueue(name)

    def publishers(self) -> Mapping[str, DirectoryPublisher]:
        return {"dir": DirectoryPublisher()}

    def worker(self, queue: str, *, visibility_seconds: int | None, **options: Unpack[WorkerOptions]) -> Worker:
        return Worker(DirectorySource(queue, visibility_seconds=visibility_seconds or 30), **options)


def install(where: Path, *, name: str = "dir", value: str = "support.directory_broker:DirectoryBroker") -> Path:
    """Make the metadata that the installation of such a package makes, and return the folder for ``sys.path``."""
    metadata = where / f"{name}_broker-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-broker\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[txbox.brokers]\n{name} = {value}\n")
    return where


_numbers: Any = itertools.count()
