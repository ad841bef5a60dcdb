"""Deliver messages to a handler through a real worker, with a fault or without one."""

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import Engine

from txbox import InvalidConfiguration, Message, Outcome
from txbox.instrumentation import Settled
from txbox_testing.database import TrialDatabase, where_txbox_is
from txbox_testing.faults import FAULT_ATTEMPTS, TIMEOUT_SECONDS, Fault
from txbox_testing.stages.stage import quiet
from txbox_testing.stages.worker_stage import Handler, WorkerStage

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine  # which needs greenlet

MAX_ATTEMPTS = 1
"""Without a fault: a handler that fails has its message parked at once, and its error is there to be looked at."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """What became of the deliveries of some messages.

    Attributes:
        settled: the event of each delivery, in the order in which they were settled.
    """

    settled: tuple[Settled, ...]

    @property
    def outcomes(self) -> list[Outcome]:
        """The outcomes of all deliveries, in this order."""
        return [each.outcome for each in self.settled]

    @property
    def outcome(self) -> Outcome:
        """The outcome of the last delivery."""
        return self.settled[-1].outcome

    @property
    def error(self) -> BaseException | None:
        """The last error that a handler raised, or that kept a message from it; None if there was none."""
        return next((each.error for each in reversed(self.settled) if each.error is not None), None)


def deliver(
    handler: Handler,
    *messages: Message,
    engine: "Engine | AsyncEngine",
    fault: Fault | None = None,
    batch: bool = False,
    timeout: float = TIMEOUT_SECONDS,
    **options: Any,
) -> Delivered:
    """Deliver messages to a handler through a real worker, until each is settled for good.

    What is handed back comes again at once.

    Args:
        handler: ``handler(session, message)``, or a ``txbox.SqlEffect``; with ``batch``,
            ``handler(session, messages)``; with ``inbox=None`` and a ``ledger``, ``handler(message)``. Coroutine
            functions, too.
        messages: what to deliver, in this order.
        engine: the database, with txbox's tables. With a fault, all its sessions may be ended.
        fault: what is to befall them, such as ``crash_at("committed")``; None: nothing.
        batch: whether the handler is called once for all of them.
        timeout: seconds until they have to be settled.
        options: of ``Worker``, or of ``AsyncWorker``; by default, ``inbox`` is ``Inbox("test")``, and ``max_attempts``
            is 1, or 5 with a fault.

    Returns:
        What became of each delivery.

    Raises:
        InvalidConfiguration: an option cannot work, or the fault could not happen to this handler.
        NotSettled: they were not settled in time.
        TypeError: something else than a message is to be delivered.
    """
    if fault is not None and fault.of != "worker":
        raise InvalidConfiguration(f"{fault.name} befalls a {fault.of}, not a worker")
    options = {"max_attempts": MAX_ATTEMPTS if fault is None else FAULT_ATTEMPTS, **options}
    with (
        contextlib.nullcontext() if fault is None else quiet(),
        TrialDatabase(engine, *where_txbox_is(options)) as database,
        WorkerStage(
            handler, messages, engine=engine, database=database, timeout=timeout, batch=batch, options=options
        ) as stage,
    ):
        if fault is None:
            stage.settle()
        elif not fault.run(stage):
            raise InvalidConfiguration(f"{fault.name} cannot happen to this handler: it was settled without it")
        return Delivered(tuple(stage.settled))
