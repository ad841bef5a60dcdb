"""The stage of workers: a broker that outlives them, and what became of each delivery."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sqlalchemy import Engine, event

from txbox import Inbox, InvalidConfiguration, Message, SqlEffect
from txbox.instrumentation import Settled
from txbox.leases.handlers import is_coroutine_function
from txbox_testing.database import TrialDatabase
from txbox_testing.stages.broker import Consumer, StageBroker
from txbox_testing.stages.life import Life, WatchedLedger
from txbox_testing.stages.stage import Stage, Stoppable
from txbox_workers.worker import Worker

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine  # which needs greenlet

RECEIVE_SECONDS = 0.01
"""How long a receive waits on an empty broker. A worker that stops waits for it."""

LEASE_SECONDS = 0.5
"""How long a killed worker's lease keeps its message, unless the options say otherwise."""

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
