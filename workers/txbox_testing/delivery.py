"""Deliver messages to a handler through a real worker, with or without a fault."""

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
"""Without a fault, a message whose handler fails is parked at once, and its error can be looked at."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """What became of the deliveries of some messages.

    Attributes:
        settled: each delivery's event, in the order in which they were settled.
    """

    settled: tuple[Settled, ...]

    @property
    def outcomes(self) -> list[Outcome]:
        """The outcomes of all deliveries, in the order in which they were settled."""
        return [each.outcome for each in self.settled]

    @property
    def outcome(self) -> Outcome:
        """The outcome of the last delivery."""
        return self.settled[-1].outcome

    @property
    def error(self) -> BaseException | None:
        """The last error that a handler raised or that kept a message from it, or None."""
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

    A message that is handed back comes again at once.

    Args:
        handler: ``handler(session, message)``, or a ``txbox.SqlEffect``; with ``batch``,
            ``handler(session, messages)``; with ``inbox=None`` and a ``ledger``, ``handler(message)``. Coroutine
            functions work as well.
        messages: the messages, delivered in this order.
        engine: the database, with txbox's tables. A fault may end all its sessions.
        fault: the fault that happens to them, such as ``crash_at("committed")``, or None.
        batch: whether the handler is called once for all of them.
        timeout: seconds within which they must be settled.
        options: of ``Worker`` or ``AsyncWorker``. By default ``inbox`` is ``Inbox("test")``, and ``max_attempts`` is 1,
            or 5 with a fault.

    Returns:
        What became of each delivery.

    Raises:
        InvalidConfiguration: an option cannot work, or the fault could not happen to this handler.
        NotSettled: they were not settled in time.
        TypeError: something other than a message is to be delivered.
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
