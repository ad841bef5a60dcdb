"""What a handler is given of a message, by its annotations: the message, or its body as a message type.

::

    handler(session, message)                                  the Message; so does ``message: Message``
    handler(session, purchase: Purchase)                       its body, read as a Purchase
    handler(session, purchase: Purchase, message: Message)     both
    batch_handler(session, purchases: Sequence[Purchase])      and here ``messages: Sequence[Message]`` as well

Reading is apart from calling: what a body is read as is a matter of the message, and may be malformed.
"""

import functools
import inspect
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin, get_type_hints

from txbox import InvalidConfiguration, Message
from txbox.leases.handlers import signature_of
from txbox.message_types import MessageType
from txbox.message_types.message_type import plain_type


@dataclass(frozen=True, slots=True)
class MessageArguments:
    """Reads messages, and makes a handler's arguments of what was read.

    Attributes:
        message_type: what bodies are read as; None: the handler takes the messages themselves.
        with_message: it takes them beside that.
    """

    message_type: MessageType | None = None
    with_message: bool = False

    def read(self, message: Message) -> tuple[Any, ...]:
        """Read a message, and return a handler's arguments; raises ``MalformedMessage``."""
        return self.of_one(message, {} if self.message_type is None else {message.id: self.message_type.read(message)})

    def of_one(self, message: Message, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the arguments of a handler; ``values`` are what was read, by message id."""
        if self.message_type is None:
            return (message,)
        return (values[message.id], message) if self.with_message else (values[message.id],)

    def of_many(self, messages: Sequence[Message], values: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the arguments of a handler of batches."""
        if self.message_type is None:
            return (messages,)
        read = [values[message.id] for message in messages]
        return (read, messages) if self.with_message else (read,)


def takes_both(handler: Any, *, after: int, batches: bool = False) -> bool:
    """Return whether a handler has a parameter for the message behind the one for what is read of it.

    Arguments are those of ``message_arguments``, which says whether there is something to be read.
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
        name: of the argument, for errors.
        after: how many parameters come before the message: 1 is the session's.
        batches: it is a handler of batches.

    Raises:
        InvalidConfiguration: an annotation is no message type, or its name is not defined when the program runs.
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


def _positional(handler: Any) -> list[inspect.Parameter]:
    signature = signature_of(handler)
    return [] if signature is None else [one for one in signature.parameters.values() if one.kind in _POSITIONAL]


def _item(annotation: Any) -> Any:
    """Return the type of a batch's items, by the annotation of the batch."""
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
    """Return a parameter's annotation, with the names in it looked up where the function is."""

    def holder() -> None: ...

    holder.__annotations__ = {"parameter": parameter.annotation}
    names = getattr(_function_of(handler), "__globals__", {})
    try:
        return get_type_hints(holder, names, include_extras=True)["parameter"]
    except NameError as error:
        written = _FORWARD_REF.sub(r"\g<name>", str(parameter.annotation))
        if _MESSAGE_BY_NAME.fullmatch(written):
            return Message  # imported for the type checker only, as it may be
        raise InvalidConfiguration(
            f"its annotation {written!r} cannot be looked up ({error}); import it also at run time, and "
            "not only under TYPE_CHECKING, or define it outside of functions"
        ) from error
    except (SyntaxError, TypeError, AttributeError) as error:
        raise InvalidConfiguration(f"its annotation {parameter.annotation!r} is no type: {error}") from error


def _function_of(handler: Any) -> Any:
    """Return the function that the annotations are of, below decorators and what is bound."""
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
"""A name, as the annotation has it that could not be looked up: quoted, or as a ``ForwardRef``."""

_MESSAGE_BY_NAME = re.compile(r"(?:[\w.]+\[)?(?:txbox\.)?Message\]?")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_UNSAID = (inspect.Parameter.empty, Any, object)
_BATCHES = (Sequence, list, Collection, Iterable)
