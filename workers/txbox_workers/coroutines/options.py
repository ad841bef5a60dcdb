"""The options of ``AsyncWorker`` and ``AsyncSqsWorker``: those of ``Worker``, except where coroutines need others."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import wraps
from typing import Any, Literal, TypedDict

from sqlalchemy import Connection, QueuePool
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_session
from sqlalchemy.orm import Session

from txbox import DeadLetters, Inbox, InvalidConfiguration, Message
from txbox.backoff import Backoff
from txbox.coroutines import AsyncInbox
from txbox.effects import SqlEffect
from txbox.instrumentation import Hook
from txbox.leases import Ledger
from txbox.leases.handlers import is_coroutine_function
from txbox.leases.ledger import require_ledger
from txbox.postgres.drivers.greenlets import wait_for, without_own_cancellations
from txbox.postgres.guards.session_binds import refuse_other_schemas, refuse_two_phases
from txbox.tracing import Tracing
from txbox_workers.coroutines.stores import ThreadCalls, ThreadedLedger, ThreadedLetters
from txbox_workers.handlers import driver_kind, refuse_with_driver
from txbox_workers.options import BATCH_SIZE, MAX_PREFETCH

AsyncHandler = Callable[..., Awaitable[object]]
"""``handler(session, message)``, with a ledger alone ``handler(message)``, as a coroutine function; see ``Handler``."""

AsyncBatchHandler = Callable[[AsyncSession, Sequence[Message]], Awaitable[object]]
"""``batch_handler(session, messages)`` as a coroutine function."""

CONCURRENCY = 10
"""Batches in progress at once. SQLAlchemy's pool has 15 connections by default."""

DEFAULTS: dict[str, Any] = {"concurrency": CONCURRENCY, "prefetch": None, "session_factory": AsyncSession}
"""The defaults that differ from ``ValidOptions``. A ``prefetch`` of None is twice what can be in progress."""


class AsyncProcessingOptions(TypedDict, total=False):
    """How messages are processed: keyword arguments of ``AsyncWorker``, ``AsyncSqsWorker`` and ``async_sqs_handler``.

    Options not listed here are those of ``txbox_workers.options.ProcessingOptions``.

    Attributes:
        inbox: an ``AsyncInbox`` or an ``Inbox``.
        ledger: any ledger; it is called in threads.
        dead_letters: with a ledger alone. If its engine comes from ``create_engine``, it is called in threads, too.
        engine: an ``AsyncEngine`` with psycopg: ``create_async_engine("postgresql+psycopg://…")``.
        handler: ``async def handler(session, message)``, whose session is an ``AsyncSession``; with a ledger alone,
            ``async def handler(message)``.
        batch_handler: ``async def batch_handler(session, messages)``.
        session_factory: makes the handler's session: ``AsyncSession`` (the default), a subclass, or an
            ``async_sessionmaker``.
    """

    inbox: AsyncInbox | Inbox | None
    ledger: Ledger | None
    engine: AsyncEngine | None
    dead_letters: DeadLetters | None
    handler: AsyncHandler | None
    batch_handler: AsyncBatchHandler | None
    effect: SqlEffect | None
    transactions: Literal["batch", "message"]
    max_attempts: int | None
    ordered: bool
    locks: Callable[[Any], object] | None
    session_factory: Callable[..., AsyncSession]
    lease_seconds: float
    fingerprint: bool
    hooks: Sequence[Hook]
    tracing: Tracing


class AsyncWorkerOptions(AsyncProcessingOptions, total=False):
    """The further options of an ``AsyncWorker``.

    Options not listed here are those of ``txbox_workers.options.WorkerOptions``.

    Attributes:
        concurrency: how many batches are in progress at once, as tasks of one event loop; 10 by default. Each uses a
            connection of the engine's pool. The messages of one batch are handled one after the other.
        prefetch: how many deliveries are received ahead and not settled yet, at most; by default twice what can be in
            progress.
        batch_size: messages per transaction, 10 by default. If handlers wait for something other than the database, use
            1: then ``concurrency`` handlers wait at once, and no transaction waits for another message's handler.
    """

    concurrency: int
    prefetch: int
    batch_size: int
    gather_seconds: float
    backoff: Backoff | None
    transaction_seconds: float | None


def for_functions(of: str, options_type: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the synchronous worker or handler that does the work.

    Args:
        of: the name of what was given the options, for errors.
        options_type: the class that types them.
        options: what was given.

    Raises:
        TypeError: there is no such option.
        InvalidConfiguration: an option cannot work here. The synchronous worker or handler validates the rest.
    """
    for name in options:
        if name not in options_type.__annotations__:
            raise TypeError(f"{of}() got an unexpected keyword argument {name!r}")
    given = dict(options)
    concurrency = 1
    if "concurrency" in options_type.__annotations__:
        concurrency = given["threads"] = given.pop("concurrency", CONCURRENCY)
        if not isinstance(concurrency, int) or not 1 <= concurrency <= MAX_PREFETCH:
            raise InvalidConfiguration(f"{of}.concurrency must be from 1 to {MAX_PREFETCH:,}, not {concurrency!r}")
        at_once = 2 * concurrency * given.get("batch_size", BATCH_SIZE)
        if given.setdefault("prefetch", min(max(at_once, BATCH_SIZE), MAX_PREFETCH)) == 0:
            raise InvalidConfiguration(f"{of}.prefetch must be at least {BATCH_SIZE}: tasks take what was received")
    if isinstance(inbox := given.get("inbox"), AsyncInbox):
        given["inbox"] = inbox.sync_inbox
    for name in ("handler", "batch_handler"):
        if given.get(name) is not None:
            given[name] = _as_function(given[name], f"{of}.{name}")
    if given.get("ledger") is not None:
        require_ledger(given["ledger"], f"{of}.ledger")
        calls = ThreadCalls(concurrency)
        given["ledger"] = ThreadedLedger(given["ledger"], calls)
        letters = given.get("dead_letters")
        if isinstance(letters, DeadLetters) and not letters.engine.dialect.is_async:
            given["dead_letters"] = ThreadedLetters(letters, calls)
    if (engine := given.get("engine")) is not None:
        given["engine"] = _sync_engine(of, engine, concurrency)
        make = given.pop("session_factory", AsyncSession)
        refuse_two_phases(make, f"{of}.session_factory")
        refuse_other_schemas(make, engine, f"{of}.session_factory")
        for name in ("handler", "batch_handler") if make is not AsyncSession else ():
            wanted = driver_kind(given.get(name), f"{of}.{name}", is_async=True)
            refuse_with_driver(wanted, f"{of}.session_factory")
        given["session_factory"] = _session_factory(engine, make)
    return given


def _sync_engine(of: str, engine: Any, concurrency: int) -> Any:
    if not isinstance(engine, AsyncEngine):
        raise InvalidConfiguration(f"{of}.engine must be an AsyncEngine, not {type(engine).__name__}")
    if engine.dialect.driver != "psycopg":
        raise InvalidConfiguration(
            f'{of}.engine must be one of psycopg, create_async_engine("postgresql+psycopg://…"), not of '
            f"{engine.dialect.driver}: a worker sends several statements in one round trip, which no other driver does"
        )
    pool = engine.pool
    if isinstance(pool, QueuePool) and pool._max_overflow >= 0:  # noqa: SLF001 - no other way
        connections = pool.size() + pool._max_overflow  # noqa: SLF001
        if connections < concurrency:
            raise InvalidConfiguration(
                f"{of}.concurrency is {concurrency}, and the engine's pool has {connections} connections: give "
                f"create_async_engine(…, pool_size={concurrency})"
            )
    return engine.sync_engine


def _as_function(handler: Any, name: str) -> Callable[..., Any]:
    """Return a coroutine handler as a function with the same parameters.

    The function takes the processor's ``Session`` and gives the handler the ``AsyncSession`` around it.

    Raises:
        InvalidConfiguration: ``handler`` is not a coroutine function; ``name`` is the argument's name.
    """
    if not is_coroutine_function(handler):
        raise InvalidConfiguration(
            f"{name} must be a coroutine function, async def …; for plain functions there are Worker and SqsWorker"
        )

    @wraps(handler, updated=())  # the default copies the mark of a coroutine function
    def call(*args: Any, **kwargs: Any) -> Any:
        given = [async_session(one) if isinstance(one, Session) else one for one in args]
        return without_own_cancellations(lambda: wait_for(handler(*given, **kwargs)))

    return call


def _session_factory(engine: AsyncEngine, make: Callable[..., AsyncSession]) -> Callable[..., Session]:
    """Return what makes the processor's session: the sync session inside an ``AsyncSession``."""

    def made(*, bind: Connection, join_transaction_mode: Any) -> Session:
        outer = make(bind=AsyncConnection(engine, bind), join_transaction_mode=join_transaction_mode)
        inner = outer.sync_session
        inner.info[_OUTER] = outer  # SQLAlchemy itself holds only a weak reference
        return inner

    return made


_OUTER = "txbox_async_session"
