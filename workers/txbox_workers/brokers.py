"""Brokers by scheme: what commands and the dashboard ask of a queue, whichever package knows it.

A queue is named as destinations are, ``scheme:rest``; a URL is that of an SQS queue, whose scheme is ``sqs``. A package
offers its broker as an entry point, in its ``pyproject.toml``::

    [project.entry-points."txbox.brokers"]
    dir = "directory_broker:DirectoryBroker"

It is imported when a queue of its scheme is named, and not before.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Protocol, Unpack, cast

from txbox import DeadLetter, InvalidConfiguration

if TYPE_CHECKING:
    from txbox.relay import AsyncPublisher, Publisher
    from txbox_workers.options import WorkerOptions
    from txbox_workers.worker import Worker

__all__ = ["GROUP", "Broker", "Queue", "broker_entry", "broker_of", "letter_sender", "scheme"]

GROUP = "txbox.brokers"
"""Of the entry points."""


class Queue(Protocol):
    """One queue, seen by its operators. One thread uses it at a time.

    Each method but ``close`` raises ``txbox.BrokerError`` when the broker cannot be reached or refuses.
    """

    def backlog(self) -> Mapping[str, int]:
        """Return how many messages it holds, about, by their state: ``waiting``, ``delivered``, ``delayed``."""

    def send_back(self, letter: DeadLetter) -> None:
        """Send a dead letter's message to this queue, under the id and with the key and headers that it had."""

    def close(self) -> None:
        """Give back connections."""


class Broker(Protocol):
    """What an entry point names, a class without arguments mostly: a package's queues of one scheme."""

    def queue(self, name: str) -> Queue:
        """Return a queue by its whole name, ``dir:/var/spool/purchases``; nothing is connected yet.

        Raises:
            InvalidConfiguration: it is not the name of a queue.
        """

    def publishers(self) -> "Mapping[str, Publisher | AsyncPublisher]":
        """Return what sends to this broker, by the scheme of its destinations: `txbox relay` takes all there are."""

    def worker(self, queue: str, *, visibility_seconds: int | None, **options: "Unpack[WorkerOptions]") -> "Worker":
        """Make a worker of a queue.

        Args:
            queue: its whole name.
            visibility_seconds: how long a killed worker's messages wait for another; None: the broker's default.
            options: those of every worker.

        Raises:
            InvalidConfiguration: an argument cannot work.
        """


def scheme(queue: str) -> str:
    """Return the scheme of a queue's name.

    Raises:
        InvalidConfiguration: it has none.
    """
    found = re.match(r"([a-z][a-z0-9+.-]*):\S", queue)
    if found is None:
        raise InvalidConfiguration(f"{queue!r} names no queue: give https://HOST/ACCOUNT/NAME of SQS, or scheme:rest")
    return "sqs" if found[1] in ("http", "https") else found[1]


def broker_of(queue: str) -> Broker:
    """Return the broker that has a queue, of the package that offers its scheme.

    Raises:
        InvalidConfiguration: no installed package offers it.
        ExtraMissing: the package is there, and what it needs is not.
    """
    return cast("Broker", broker_entry(queue).load()())


def broker_entry(queue: str) -> EntryPoint:
    """Return the entry point of a queue's broker, and import nothing; raises ``InvalidConfiguration`` if none is."""
    name = scheme(queue)
    found = entry_points(group=GROUP)
    for entry in found.select(name=name):
        return entry
    offered = ", ".join(sorted(found.names)) or "no scheme at all"
    raise InvalidConfiguration(f"no installed package has the queue {queue!r}: they offer {offered}, and not {name}")


@contextmanager
def letter_sender(queue: str | None = None) -> Iterator[Callable[[DeadLetter], None]]:
    """Give a function that sends letters back to their own queues, or to this one; it opens each queue once."""
    with ExitStack() as opened:
        queues: dict[str, Queue] = {}

        def send(letter: DeadLetter) -> None:
            target = queue or letter.source
            if target not in queues:
                queues[target] = opened.enter_context(closing(broker_of(target).queue(target)))
            queues[target].send_back(letter)

        yield send
