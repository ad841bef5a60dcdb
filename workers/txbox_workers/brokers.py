"""Find a queue's broker by its scheme: what the commands and the dashboard ask of a queue, whichever package knows it.

A queue is named like a destination, ``scheme:rest``. A URL names an SQS queue; its scheme is ``sqs``. A package offers
its broker as an entry point in its ``pyproject.toml``::

    [project.entry-points."txbox.brokers"]
    dir = "directory_broker:DirectoryBroker"

The entry point is imported only when a queue of its scheme is named.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Protocol, Unpack, cast

from sqlalchemy import Engine

from txbox import DeadLetter, InvalidConfiguration, TxboxError

if TYPE_CHECKING:
    from txbox.relay import AsyncPublisher, Publisher
    from txbox_workers.options import WorkerOptions
    from txbox_workers.worker import Worker

__all__ = ["GROUP", "Broker", "DatabasePlace", "Queue", "broker_entry", "broker_of", "letter_sender", "load", "scheme"]

GROUP = "txbox.brokers"
"""The group of the entry points."""


@dataclass(frozen=True, slots=True)
class DatabasePlace:
    """The database that is asked about a queue: a broker whose queues are in it needs no other connection.

    Attributes:
        engine: where to open short transactions.
        schema: the Postgres schema that holds the tables; None leaves it to the search path.
        prefix: what the tables' names start with.
    """

    engine: Engine
    schema: str | None = None
    prefix: str = ""


class Queue(Protocol):
    """A queue as its operators see it. One thread uses it at a time.

    Every method but ``close`` raises ``txbox.BrokerError`` if the broker cannot be reached or refuses.
    """

    def backlog(self) -> Mapping[str, int]:
        """Return about how many messages the queue holds, by state: ``waiting``, ``delivered``, ``delayed``."""

    def send_back(self, letter: DeadLetter) -> None:
        """Send a dead letter's message to this queue with its original id, key and headers."""

    def close(self) -> None:
        """Close the connections."""


class Broker(Protocol):
    """The queues of one scheme in one package. The entry point names it, usually a class without arguments."""

    def queue(self, name: str, place: DatabasePlace) -> Queue:
        """Return a queue by its full name, such as ``dir:/var/spool/purchases``. It does not connect yet.

        Args:
            name: its full name.
            place: the database of the command or the dashboard that asks.

        Raises:
            InvalidConfiguration: this is not the name of a queue.
        """

    def publishers(self) -> "Mapping[str, Publisher | AsyncPublisher]":
        """Return the publishers for this broker, by the scheme of their destinations. `txbox relay` uses them all."""

    def worker(self, queue: str, *, visibility_seconds: int | None, **options: "Unpack[WorkerOptions]") -> "Worker":
        """Return a worker for a queue.

        Args:
            queue: its full name.
            visibility_seconds: how long a killed worker's messages wait for another worker; None uses the broker's
                default.
            options: the options of every worker.

        Raises:
            InvalidConfiguration: an argument cannot work.
        """


def scheme(queue: str) -> str:
    """Return the scheme of a queue's name.

    Raises:
        InvalidConfiguration: the name has no scheme.
    """
    found = re.match(r"([a-z][a-z0-9+.-]*):\S", queue)
    if found is None:
        raise InvalidConfiguration(f"{queue!r} names no queue: give https://HOST/ACCOUNT/NAME of SQS, or scheme:rest")
    return "sqs" if found[1] in ("http", "https") else found[1]


def broker_of(queue: str) -> Broker:
    """Return the broker that has this queue, from the package that offers its scheme.

    Raises:
        InvalidConfiguration: no installed package offers it, or the package cannot be imported.
        ExtraMissing: the package is installed, but something it needs is not.
    """
    return load(broker_entry(queue))


def load(entry: EntryPoint) -> Broker:
    """Return the broker that an entry point names. It raises what ``broker_of`` does."""
    try:
        return cast("Broker", entry.load()())
    except TxboxError:
        raise
    except Exception as error:  # whatever a package does when it is imported
        raise InvalidConfiguration(f"{entry.value} cannot be used: {type(error).__name__}: {error}") from error


def broker_entry(queue: str) -> EntryPoint:
    """Return the entry point of a queue's broker without importing it. Raise ``InvalidConfiguration`` if none fits."""
    name = scheme(queue)
    found = entry_points(group=GROUP)
    for entry in found.select(name=name):
        return entry
    offered = ", ".join(sorted(found.names)) or "no scheme at all"
    raise InvalidConfiguration(f"no installed package has the queue {queue!r}: they offer {offered}, and not {name}")


@contextmanager
def letter_sender(place: DatabasePlace, queue: str | None = None) -> Iterator[Callable[[DeadLetter], None]]:
    """Yield a function that sends letters back to their own queues, or all to ``queue``. It opens each queue once."""
    with ExitStack() as opened:
        queues: dict[str, Queue] = {}

        def send(letter: DeadLetter) -> None:
            target = queue or letter.source
            if target not in queues:
                queues[target] = opened.enter_context(closing(broker_of(target).queue(target, place)))
            queues[target].send_back(letter)

        yield send
