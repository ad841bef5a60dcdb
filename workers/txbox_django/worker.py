"""A worker whose handlers use Django's ORM: Django uses the worker's transaction while a handler runs.

So everything that a worker promises holds: one transaction for inbox and effects, batches, attempts, parking. Callbacks
that a handler gives to ``transaction.on_commit`` run after the worker's commit, in the worker's thread.
"""

import functools
import inspect
import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from django.db import close_old_connections, reset_queries, transaction
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from txbox import InvalidConfiguration, TransactionAborted
from txbox.instrumentation import Committed, Event
from txbox.leases.handlers import refuse_unfinished, signature_of
from txbox_django.engine import database_engine, lent, require_lendable
from txbox_workers.handlers import refuse_unfinishable, refuse_unfit, takes_both
from txbox_workers.worker import Worker

W = TypeVar("W", bound=Worker)

ASYNC_TO_SYNC = (
    "call asgiref's async_to_sync(…)(…) in a plain function; with asyncio.run the ORM would work in another thread, "
    "outside of the worker's transaction"
)
"""Advice for a coroutine function."""


def orm_worker(
    worker_class: type[W],
    source: Any,
    *,
    handler: Callable[..., object] | None = None,
    batch_handler: Callable[..., object] | None = None,
    using: str = "default",
    engine: Engine | None = None,
    **options: Any,
) -> W:
    """Make a worker whose handlers use Django's ORM, in the transaction that records their messages.

    Args:
        worker_class: ``SqsWorker``, or another ``Worker``.
        source: its first argument, such as the queue's URL.
        handler: ``handler(message)``. Inside it, ``django.db.connection``, and so the ORM, is in the worker's
            transaction. Otherwise it is like any other: ``handler(purchase: Purchase)`` gets the body as a message
            type.
        batch_handler: ``batch_handler(messages)`` instead: one call for all first-time messages of a batch.
        using: the alias of the database, which also has txbox's tables.
        engine: an engine that ``database_engine`` made for that database; None: make one.
        options: those of the worker, such as ``inbox`` and ``threads``.

    Returns:
        The worker; it connects only at ``start`` or ``run``.

    Raises:
        InvalidConfiguration: an option cannot work.
    """
    of = worker_class.__name__
    if not issubclass(worker_class, Worker):
        raise InvalidConfiguration(f"orm_worker takes SqsWorker or Worker, not {of}: Django has no async transactions")
    if (handler is None) == (batch_handler is None):
        raise InvalidConfiguration(f"{of} needs one of handler and batch_handler")
    given, name = (handler, "handler") if batch_handler is None else (batch_handler, "batch_handler")
    batches = batch_handler is not None
    wanted = "value, message" if takes_both(given, after=0, batches=batches) else "messages" if batches else "message"
    refuse_unfinishable(given, f"{of}.{name}", ASYNC_TO_SYNC)
    refuse_unfit(given, f"{of}.{name}", wanted, ledger=options.get("ledger") is not None)
    transactions = OrmTransactions(using)
    if engine is None:  # each thread has one connection, and reports have one
        engine = database_engine(using, pool_size=options.get("threads", 1) + 1)
    require_lendable(engine, f"{of}.engine")
    options[name] = transactions.wrap(given)
    options["hooks"] = [transactions.committed, *options.get("hooks", ())]
    return worker_class(source, engine=engine, **options)


class OrmTransactions:
    """Runs handlers in a worker's transactions, and their ``on_commit`` callbacks after the commit."""

    def __init__(self, using: str) -> None:
        self._using = using
        self._local = threading.local()

    def wrap(self, handler: Any) -> Callable[..., object]:
        """Return a worker's handler, whose annotations tell the worker what the Django handler takes."""

        @functools.wraps(handler)
        def handle(session: Session, *given: Any, **lease: Any) -> object:
            return self._run(session, lambda: handler(*given, **lease))

        signature = signature_of(handler)
        assert signature is not None  # noqa: S101 - for the type checker: a function of Python has one
        session = inspect.Parameter("session", inspect.Parameter.POSITIONAL_ONLY)
        handle.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[session, *signature.parameters.values()]
        )
        return handle

    def _run(self, session: Session, work: Callable[[], object]) -> object:
        """Run a handler in the session's transaction.

        Raises:
            TransactionAborted: Django has marked the transaction for rollback.
        """
        connection = session.connection()
        worker_transaction = connection.get_transaction()
        if getattr(self._local, "transaction", None) is not worker_transaction:
            # Any callbacks left are of a transaction that was rolled back.
            self._local.transaction, self._local.callbacks = worker_transaction, []
        reset_queries()
        close_old_connections()
        with lent(connection.connection.dbapi_connection, self._using) as wrapper:
            with transaction.atomic(self._using, savepoint=False):
                result = work()
                refuse_unfinished(result, instead=ASYNC_TO_SYNC)
            if wrapper.needs_rollback:
                raise TransactionAborted
            self._local.callbacks += [function for _, function, _ in wrapper.run_on_commit]
        return result

    def committed(self, event: Event) -> None:
        """After a commit, call the ``on_commit`` callbacks of its handlers. A hook."""
        if not isinstance(event, Committed):
            return
        callbacks = getattr(self._local, "callbacks", [])
        self._local.transaction, self._local.callbacks = None, []
        if not event.first:  # no handler has run in it: the callbacks are of an earlier one, which was rolled back
            return
        for callback in callbacks:
            try:
                callback()
            except Exception:  # noqa: BLE001 - the effects have committed, and the other callbacks must run
                _log.exception("on_commit: %r has failed", callback)
        if callbacks:
            close_old_connections()


_log = logging.getLogger("txbox.django")
