"""Check handlers, and choose what they are given of a message by their annotations: the message, or its body as a type.

::

    handler(session, message)                                  the Message; so does ``message: Message``
    handler(session, purchase: Purchase)                       its body, read as a Purchase
    handler(session, purchase: Purchase, message: Message)     both
    batch_handler(session, purchases: Sequence[Purchase])      and here ``messages: Sequence[Message]`` as well

Reading is separate from calling: it depends on the message alone, which may be malformed.
"""

import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, get_args, get_origin, get_type_hints

import psycopg
from sqlalchemy import Connection
from sqlalchemy.orm import Session

from txbox import InvalidConfiguration, Message
from txbox.leases import Lease
from txbox.leases.handlers import has_lease_parameter, is_coroutine_function, signature_of
from txbox.messages import MessageType
from txbox.messages.message_type import plain_type


class HandlerWithLease(Protocol):
    """``handler(session, message, lease=…)``, for an inbox with a ledger."""

    def __call__(self, session: Any, message: Any, /, *, lease: Lease) -> object:
        """Apply one message in the session's transaction, under a lease; raise to roll it back."""


class HandlerWithMessageAndLease(Protocol):
    """``handler(session, purchase, message, lease=…)``, for an inbox with a ledger."""

    def __call__(self, session: Any, value: Any, message: Message, /, *, lease: Lease) -> object:
        """Apply one message in the session's transaction, under a lease; raise to roll it back."""


class LedgerHandlerWithLease(Protocol):
    """``handler(message, lease=…)``, for a ledger alone."""

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
"""``handler(session, message)`` applies one message in the session's transaction and raises to roll it back. With a
ledger alone it is ``handler(message)``. With a ledger, a parameter named ``lease`` receives the lease. A parameter
annotated with a message type receives the body as that type, and may be followed by one for the message."""

BatchHandler = Callable[[Any, list[Any]], object] | Callable[[Any, list[Any], list[Message]], object]
"""``batch_handler(session, messages)`` applies all messages that are first, in one transaction. A parameter annotated
with a message type receives the bodies as that type, and may be followed by one for the messages."""


class SessionFactory(Protocol):
    """Makes the session for a handler: ``Session`` itself, a subclass, or a ``sessionmaker``."""

    def __call__(self, *, bind: Connection, join_transaction_mode: Any) -> Session:
        """Return a session that works in this connection's transaction."""


_ASYNC_TWINS = {"Worker": "AsyncWorker", "SqsWorker": "AsyncSqsWorker", "sqs_handler": "async_sqs_handler"}


def refuse_unfinishable(handler: Any, name: str, instead: str | None = None) -> None:
    """Raise ``InvalidConfiguration`` if ``handler`` is not a function, or would return before it has run.

    ``name`` is the argument's name; ``instead`` says what to do with a coroutine function. By default that is to use
    the class for coroutines, if there is one, or ``asyncio.run``.
    """
    if not callable(handler):
        raise InvalidConfiguration(f"{name} must be a function, not {type(handler).__name__}")
    parts = (handler, getattr(handler, "__call__", None))  # noqa: B004 - of an object
    if is_coroutine_function(handler) or any(kind(part) for part in parts for kind in _UNFINISHED):
        twin = _ASYNC_TWINS.get(name.partition(".")[0])
        use = "" if twin is None else f"{twin} takes coroutine functions; or "
        raise InvalidConfiguration(
            f"{name} must be a plain function: a coroutine function or a generator would return before it "
            f"has run; {instead or f'{use}call asyncio.run(…) in a plain function'}"
        )


def refuse_unfit(handler: Any, name: str, wanted: str, *, ledger: bool) -> None:
    """Raise ``InvalidConfiguration`` if ``handler`` cannot be called as needed, or would return before it has run.

    ``name`` is the argument's name, and ``wanted`` shows the call, such as ``session, message``. With a ``ledger``, a
    handler may also have a parameter ``lease``.
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


@dataclass(frozen=True, slots=True)
class MessageArguments:
    """Reads messages and makes the handler's arguments from the result.

    Attributes:
        message_type: what bodies are read as; None if the handler takes the messages themselves.
        with_message: the handler takes the message as well.
    """

    message_type: MessageType | None = None
    with_message: bool = False

    def read(self, message: Message) -> tuple[Any, ...]:
        """Read a message and return the handler's arguments; raise ``MalformedMessage`` if it cannot be read."""
        return self.of_one(message, {} if self.message_type is None else {message.id: self.message_type.read(message)})

    def of_one(self, message: Message, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return a handler's arguments; ``values`` has what was read, by message id."""
        if self.message_type is None:
            return (message,)
        return (values[message.id], message) if self.with_message else (values[message.id],)

    def of_many(self, messages: Sequence[Message], values: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return a batch handler's arguments."""
        if self.message_type is None:
            return (messages,)
        read = [values[message.id] for message in messages]
        return (read, messages) if self.with_message else (read,)


def takes_both(handler: Any, *, after: int, batches: bool = False) -> bool:
    """Return whether a handler takes the message as well, in the parameter after the one for what is read of it.

    The arguments are those of ``message_arguments``, which says whether anything is read at all.
    """
    parameters = _positional(handler)
    if len(parameters) <= after + 1 or parameters[after + 1].name == "lease":
        return False
    try:
        annotation = _annotation(handler, parameters[after + 1])
        return (_item(annotation) if batches else annotation) is Message
    except InvalidConfiguration:
        return False


def message_arguments(handler: Any, name: str, *, after: int, batches: bool = False) -> MessageArguments:
    """Return what a handler is given, by its annotations.

    Args:
        handler: the function.
        name: the argument's name, for errors.
        after: how many parameters come before the message: 1 if the handler takes a session.
        batches: it is a batch handler.

    Raises:
        InvalidConfiguration: an annotation is not a message type, or its name is not defined at run time.
    """
    parameters = _positional(handler)
    if len(parameters) <= after:
        return MessageArguments()
    try:
        wanted = _annotation(handler, parameters[after])
        if batches:
            wanted = _item(wanted)
        both = takes_both(handler, after=after, batches=batches)
        plain = plain_type(wanted)
        if plain in _UNSAID or (isinstance(plain, type) and issubclass(plain, Message)):
            if both:
                raise InvalidConfiguration(f"it takes the message, and {parameters[after + 1].name} would be it again")
            return MessageArguments()
        return MessageArguments(MessageType(wanted), both)
    except InvalidConfiguration as error:
        raise InvalidConfiguration(f"{name}, parameter {parameters[after].name}: {error}") from error


def driver_kind(handler: Any, name: str, *, is_async: bool) -> type | None:
    """Return which of psycopg's classes a handler wants to work with, by its first parameter; None: a session.

    Args:
        handler: the function.
        name: the argument's name, for errors.
        is_async: it is a coroutine function.

    Raises:
        InvalidConfiguration: a handler of this kind cannot work with that, or its annotation cannot be looked up.
    """
    parameters = _positional(handler)
    if not parameters:
        return None
    of = f"{name}, parameter {parameters[0].name}"
    try:
        annotation = _annotation(handler, parameters[0])
    except InvalidConfiguration as error:
        if _DRIVER_BY_NAME.search(str(parameters[0].annotation)):
            raise InvalidConfiguration(f"{of}: {error}") from error
        return None  # a session, say, which may be imported for the type checker only
    wanted = get_origin(annotation) or annotation
    if not (isinstance(wanted, type) and issubclass(wanted, _DRIVERS)):
        return None
    fitting = (psycopg.AsyncConnection, psycopg.AsyncCursor) if is_async else (psycopg.Connection, psycopg.Cursor)
    if wanted not in fitting:
        names = " or ".join(f"psycopg.{one.__name__}" for one in fitting)
        raise InvalidConfiguration(f"{of} must be a session, {names}, not {wanted.__module__}.{wanted.__qualname__}")
    return wanted


def refuse_with_driver(wanted: type | None, name: str) -> None:
    """Raise ``InvalidConfiguration`` for a session factory, ``name``, whose handler ``wanted`` no session."""
    if wanted is not None:
        raise InvalidConfiguration(
            f"{name} has no use: the handler works with psycopg.{wanted.__name__}, and what sessions of the factory do "
            "would not be done; leave it out, or annotate the handler's first parameter with Session"
        )


def _positional(handler: Any) -> list[inspect.Parameter]:
    signature = signature_of(handler)
    return [] if signature is None else [one for one in signature.parameters.values() if one.kind in _POSITIONAL]


def _item(annotation: Any) -> Any:
    """Return the type of a batch's items, from the batch's annotation."""
    while hasattr(annotation, "__value__"):  # type Purchases = Sequence[Purchase]
        annotation = annotation.__value__
    parts = get_args(annotation)
    is_batch = (get_origin(annotation) or annotation) in _BATCHES
    if annotation in _UNSAID or (is_batch and not parts):
        return Any
    if annotation is Message or Message in parts:
        return Message
    if is_batch:
        return parts[0]
    raise InvalidConfiguration(f"a handler of batches takes such as Sequence[Purchase], and not {annotation!r}")


def _annotation(handler: Any, parameter: inspect.Parameter) -> Any:
    """Return a parameter's annotation, with its names looked up in the function's module."""

    def holder() -> None: ...

    holder.__annotations__ = {"parameter": parameter.annotation}
    names = getattr(_function_of(handler), "__globals__", {})
    try:
        return get_type_hints(holder, names, include_extras=True)["parameter"]
    except NameError as error:
        written = _FORWARD_REF.sub(r"\g<name>", str(parameter.annotation))
        if _MESSAGE_BY_NAME.fullmatch(written):
            return Message  # it may be imported for the type checker only
        raise InvalidConfiguration(
            f"its annotation {written!r} cannot be looked up ({error}); import it also at run time, and "
            "not only under TYPE_CHECKING, or define it outside of functions"
        ) from error
    except (SyntaxError, TypeError, AttributeError) as error:
        raise InvalidConfiguration(f"its annotation {parameter.annotation!r} is no type: {error}") from error


def _function_of(handler: Any) -> Any:
    """Return the function that has the annotations, below decorators and bound methods."""
    while True:
        if isinstance(handler, functools.partial):
            handler = handler.func
        elif inspect.ismethod(handler):
            handler = handler.__func__
        elif hasattr(handler, "__wrapped__"):
            handler = handler.__wrapped__
        elif not inspect.isroutine(handler) and not isinstance(handler, type):
            handler = type(handler).__call__
        else:
            return handler


_FORWARD_REF = re.compile(r"""(?:ForwardRef\()?(?P<quote>['"])(?P<name>[^'"]*)(?P=quote)(?:[^()]*\))?""")
"""The name in an annotation that could not be looked up: quoted, or a ``ForwardRef``."""

_MESSAGE_BY_NAME = re.compile(r"(?:[\w.]+\[)?(?:txbox\.)?Message\]?")
_DRIVERS = (psycopg.BaseConnection, psycopg.Cursor, psycopg.AsyncCursor)
_DRIVER_BY_NAME = re.compile(r"\b(Async)?(Connection|Cursor)\b")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_UNSAID = (inspect.Parameter.empty, Any, object)
_BATCHES = (Sequence, list, Collection, Iterable)
_UNFINISHED = (inspect.isgeneratorfunction, inspect.isasyncgenfunction)
