"""Coroutine handlers as the processor calls them: as functions, which wait for them in its greenlet."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_session
from sqlalchemy.orm import Session

from txbox import InvalidConfiguration
from txbox.leases.handlers import is_coroutine_function
from txbox.postgres.drivers.greenlets import wait_for, without_own_cancellations


def as_function(handler: Any, name: str) -> Callable[..., Any]:
    """Return a coroutine handler as a function with the same parameters.

    It is given the processor's ``Session``, and gives the handler the ``AsyncSession`` around it.

    Raises:
        InvalidConfiguration: it is no coroutine function; ``name`` is that of the argument.
    """
    if not is_coroutine_function(handler):
        raise InvalidConfiguration(
            f"{name} must be a coroutine function, async def …; for plain functions there are Worker and SqsWorker"
        )

    @wraps(handler, updated=())  # a mark that it is a coroutine function is an attribute, and this is none
    def call(*args: Any, **kwargs: Any) -> Any:
        given = [async_session(one) if isinstance(one, Session) else one for one in args]
        return without_own_cancellations(lambda: wait_for(handler(*given, **kwargs)))

    return call


def session_factory(engine: AsyncEngine, make: Callable[..., AsyncSession]) -> Callable[..., Session]:
    """Return what makes the processor's session, which is that of an ``AsyncSession``."""

    def made(*, bind: Connection, join_transaction_mode: Any) -> Session:
        outer = make(bind=AsyncConnection(engine, bind), join_transaction_mode=join_transaction_mode)
        inner = outer.sync_session
        inner.info[_OUTER] = outer  # SQLAlchemy itself would forget it as soon as nobody else has it
        return inner

    return made


_OUTER = "txbox_async_session"
