"""The stage of workers, and the broker that outlives them: it redelivers at once, and visibility ends when told."""

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sqlalchemy import Engine, event

from txbox import BrokerError, Inbox, InvalidConfiguration, Message, Outcome, SqlEffect
from txbox.instrumentation import Settled
from txbox.leases.handlers import is_coroutine_function
from txbox_testing.database import TrialDatabase
from txbox_testing.stages.life import Killed, Life, WatchedLedger
from txbox_testing.stages.stage import Stage, Stoppable
from txbox_workers.delivery import Delivery, Settlement
from txbox_workers.memory_source import MemorySource
from txbox_workers.worker import Worker

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine  # which needs greenlet

RECEIVE_SECONDS = 0.01
"""How long a receive waits on an empty broker. A worker that stops waits for it."""

LEASE_SECONDS = 0.5
"""How long a killed worker's lease keeps its message, unless the options say otherwise."""

AGAIN_SECONDS = 0.02
"""The longest time for which a delivery that was handed back stays away: a test has no use for a backoff of minutes."""

Handler = Callable[..., Any] | SqlEffect


class WorkerStage(Stage):
    """Has messages processed by real workers.

    Args:
        messages: delivered in this order.
        database: the same database, seen by the trial.
        timeout: seconds that each step may take.
        batch: whether the handler takes all messages in one call.
        options: of the workers.
    """

    def __init__(
        self,
        handler: Handler,
        messages: Sequence[Message],
        *,
        engine: "Engine | AsyncEngine",
        database: TrialDatabase,
        timeout: float,
        batch: bool,
        options: Mapping[str, Any],
    ) -> None:
        if not messages:
            raise InvalidConfiguration("there is no message to deliver")
        if wrong := [type(each).__name__ for each in messages if not isinstance(each, Message)]:
            raise TypeError(f"what is delivered is a Message, not a {wrong[0]}: wrap it in Message(id, body)")
        self._of_coroutines = is_coroutine_function(handler)
        super().__init__(_for_coroutines(engine) if self._of_coroutines else engine, database, timeout)
        used = [engine, getattr(options.get("ledger"), "_engine", None)]  # a Postgres ledger's
        self.engines.update(each for each in used if isinstance(each, Engine))
        self._handler = handler
        self._kind = "effect" if isinstance(handler, SqlEffect) else "batch_handler" if batch else "handler"
        self._messages = messages
        self._options = {"inbox": Inbox("test"), "lease_seconds": LEASE_SECONDS, **options}
        self.broker = StageBroker(messages, batch_size=len(messages), wait_seconds=RECEIVE_SECONDS, name="test")
        self._consumers: dict[Life, Consumer] = {}
        self.loses_ack = False

    @property
    def settled(self) -> list[Settled]:
        """What became of each delivery, in this order, across all lives."""
        return [each for each in self.events if isinstance(each, Settled)]

    def make(self, life: Life) -> Stoppable:
        consumer = self._consumers[life] = Consumer(self.broker, life)
        consumer.loses_ack, self.loses_ack = self.loses_ack, False
        options = dict(self._options)
        options[self._kind] = self._handler if isinstance(self._handler, SqlEffect) else life.watch(self._handler)
        if options.get("ledger") is not None:
            options["ledger"] = WatchedLedger(options["ledger"], life)
        options["hooks"] = [*options.get("hooks", ()), self.events.append]
        if self._of_coroutines:
            from txbox_testing.stages.loop_service import LoopService  # needs greenlet, as coroutines do

            return LoopService(consumer, life, self.engine, options)
        if options["inbox"] is not None:
            options["engine"] = self.engine
        return Worker(consumer, **options)

    def is_done(self) -> bool:
        """Whether every message is acked."""
        return self.broker.wait_until_empty(0)

    def redeliver(self) -> None:
        self.broker.end_visibility()

    def send_again(self) -> None:
        """Deliver a copy of every message."""
        for message in self._messages:
            self.broker.send(message)

    def await_settlement(self, life: Life, timeout: float) -> bool:
        """Wait until this life's worker has acked or handed back something. Return whether that came in time."""
        return self.wait_until(self._consumers[life].settled.is_set, timeout)


def _for_coroutines(engine: "Engine | AsyncEngine") -> "Engine | AsyncEngine":
    """Return an async engine that connects as another one does: with its arguments, isolation level and options."""
    if not isinstance(engine, Engine) or engine.dialect.is_async:
        return engine
    from sqlalchemy.ext.asyncio import create_async_engine

    arguments: dict[str, Any] = {}

    def keep(_dialect: Any, _record: Any, _arguments: Any, given: dict[str, Any]) -> None:
        arguments.update(given)

    event.listen(engine, "do_connect", keep)
    pool = engine.pool.recreate()  # forces a new connection: an engine does not reveal its arguments otherwise
    try:
        connection = pool.connect()
        level = engine.dialect.get_isolation_level(connection.dbapi_connection)  # type: ignore[arg-type]
        connection.close()
    finally:
        event.remove(engine, "do_connect", keep)
        pool.dispose()
    arguments.pop("context", None)  # the driver's, for functions
    options = engine.get_execution_options()
    return create_async_engine(
        engine.url, connect_args=arguments, isolation_level=level, execution_options=dict(options)
    )


class StageBroker(MemorySource):
    """Delivers from memory, and outlives the workers that are killed."""

    def hand_back(self, settlements: Sequence[Settlement]) -> None:
        super().hand_back([each._replace(delay_seconds=min(each.delay_seconds, AGAIN_SECONDS)) for each in settlements])

    def end_visibility(self) -> None:
        """Redeliver what was received and is not settled. What its receivers say of it no longer counts."""
        with self._condition:
            taken = tuple(self._taken.values())
        self.give_back(taken)

    def give_back(self, deliveries: Sequence[Delivery]) -> None:
        self.hand_back([Settlement(delivery, Outcome.IN_FLIGHT) for delivery in deliveries])


class Consumer:
    """The broker as the worker of one life sees it. After the worker's death nothing passes. Implements ``Source``."""

    def __init__(self, broker: StageBroker, life: Life) -> None:
        self._broker = broker
        self._life = life
        self.loses_ack = False
        self.settled = threading.Event()  # it has settled some delivery

    @property
    def name(self) -> str:
        return self._broker.name

    @property
    def visibility_seconds(self) -> float | None:
        """None: visibility ends when the trial says so."""
        return None

    def open(self) -> None:
        """Nothing to check."""

    def receive(self) -> Sequence[Delivery]:
        """Return the next deliveries; none to a worker that is dead or held."""
        if self._takes_nothing():
            time.sleep(AGAIN_SECONDS)
            return ()
        deliveries = self._broker.receive()
        if deliveries and self._takes_nothing():  # while it waited for them
            self._broker.give_back(deliveries)
            return ()
        return deliveries if not deliveries or self._passes("received") else ()

    def ack(self, deliveries: Sequence[Delivery]) -> Collection[str]:
        """Ack deliveries, or lose one ack."""
        if not self._passes("committed"):
            return ()
        if self.loses_ack:
            self.loses_ack = False
            self._broker.end_visibility()
            raise BrokerError("the ack was lost, as this trial wants it")
        acked = self._broker.ack(deliveries)
        self.settled.set()
        return acked if self._passes("acked") else ()

    def hand_back(self, settlements: Sequence[Settlement]) -> None:
        if not self._life.dead:
            self._broker.hand_back(settlements)
            self.settled.set()

    def extend_visibility(self, deliveries: Sequence[Delivery], seconds: float) -> Mapping[str, str]:  # noqa: ARG002 - protocol
        """Nothing to extend."""
        return {}

    def close(self) -> None:
        """Nothing to close: the broker is not the worker's."""

    def _takes_nothing(self) -> bool:
        return self._life.dead or self._life.held

    def _passes(self, place: str) -> bool:
        """Pass a place. Return whether this worker is still alive; if not, its threads end by themselves."""
        if self._life.dead:
            return False
        try:
            self._life.reach(place)
        except Killed:
            return False
        return not self._life.dead
