"""What a handler has to be."""

import inspect
from collections.abc import Callable
from typing import Any, Protocol

from sqlalchemy import Connection
from sqlalchemy.orm import Session

from txbox import InvalidConfiguration, Message
from txbox.leases import Lease
from txbox.leases.handlers import has_lease_parameter, is_coroutine_function, signature_of


class HandlerWithLease(Protocol):
    """handler(session, message, lease=…), beside an inbox with a ledger."""

    def __call__(self, session: Any, message: Any, /, *, lease: Lease) -> object:
        """Apply one message in the session's transaction, under a lease; raise to have it rolled back."""


class HandlerWithMessageAndLease(Protocol):
    """handler(session, purchase, message, lease=…), beside an inbox with a ledger."""

    def __call__(self, session: Any, value: Any, message: Message, /, *, lease: Lease) -> object:
        """Apply one message in the session's transaction, under a lease; raise to have it rolled back."""


class LedgerHandlerWithLease(Protocol):
    """handler(message, lease=…), with a ledger alone."""

    def __call__(self, message: Any, /, *, lease: Lease) -> object:
        """Do the work of one message; raise if it failed."""


Handler = (
    Callable[[Any, Any], object]
    | Callable[[Any, Any, Message], object]
    | Callable[[Any], object]
    | HandlerWithLease
    | HandlerWithMessageAndLease
    | LedgerHandlerWithLease
)
"""handler(session, message): applies one message in the session's transaction; raises to have it rolled back. With a
ledger alone, handler(message). With a ledger, one that names a parameter ``lease`` is given it. In place of the
message, an object of the message type with which the parameter is annotated; and the message behind it."""

BatchHandler = Callable[[Any, list[Any]], object] | Callable[[Any, list[Any], list[Message]], object]
"""batch_handler(session, messages): applies all the messages that are first, in one transaction. In place of messages,
objects of a message type; and the messages behind them."""


class SessionFactory(Protocol):
    """Makes the session that a handler is given: ``Session`` itself, a subclass, or a ``sessionmaker``."""

    def __call__(self, *, bind: Connection, join_transaction_mode: Any) -> Session:
        """Make a session that works in the transaction of this connection."""


def refuse_unfinishable(handler: Any, name: str, instead: str = "call asyncio.run(…) in a plain function") -> None:
    """Refuse, with ``InvalidConfiguration``, what is no function, or would return before it has run.

    ``name`` is that of the argument; ``instead`` says what to do with a coroutine function.
    """
    if not callable(handler):
        raise InvalidConfiguration(f"{name} must be a function, not {type(handler).__name__}")
    parts = (handler, getattr(handler, "__call__", None))  # noqa: B004 - of an object
    if is_coroutine_function(handler) or any(kind(part) for part in parts for kind in _UNFINISHED):
        raise InvalidConfiguration(
            f"{name} must be a plain function: a coroutine function or a generator would return before it "
            f"has run; {instead}"
        )


def refuse_unfit(handler: Any, name: str, wanted: str, *, ledger: bool) -> None:
    """Refuse, with ``InvalidConfiguration``, what cannot be called as it will be, or would return before it has run.

    ``name`` is that of the argument, and ``wanted`` says how it is called, such as ``session, message``. With a
    ``ledger`` there is a lease for a handler that names it.
    """
    refuse_unfinishable(handler, name)
    signature = signature_of(handler)
    if signature is None:
        return
    lease = {"lease": None} if ledger and has_lease_parameter(handler) else {}
    try:
        signature.bind(*wanted.split(", "), **lease)
    except TypeError as error:
        called = getattr(handler, "__qualname__", type(handler).__name__)
        may = "; a parameter lease is given it" if ledger else ""
        raise InvalidConfiguration(
            f"{name} is called with ({wanted}) here{may}, and {called} takes {signature}"
        ) from error


_UNFINISHED = (inspect.isgeneratorfunction, inspect.isasyncgenfunction)
