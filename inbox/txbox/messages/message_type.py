"""A message type, and how pydantic reads a body as it, from JSON.

A body is malformed if pydantic says so, or if it is not JSON: pydantic reads ``NaN`` and ``Infinity``, which RFC 8259
does not have. Of two members with one name, the last counts, as for ``json.loads``.
"""

import re
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from txbox.errors import InvalidConfiguration, MalformedMessage, install_command
from txbox.messages.message import Message

MAX_ERRORS = 10
"""How many of the validator's errors are reported for one body."""

MAX_COUNTED_ERRORS = 1_000
"""Above this, only the number of errors is reported: pydantic lists all of them or none."""

MAX_ERROR_CHARACTERS = 200
"""For one of them: a host's validator may quote the body."""


def plain_type(of: Any) -> Any:
    """Return the type that an alias, a ``NewType`` or an ``Annotated`` stands for."""
    while True:
        if get_origin(of) is Annotated:
            of = get_args(of)[0]
        elif (beneath := getattr(of, "__supertype__", getattr(of, "__value__", None))) is not None:
            of = beneath
        else:
            return of


def _members(of: Any) -> list[Any]:
    plain = plain_type(of)
    if isinstance(plain, UnionType) or get_origin(plain) is Union:
        return [member for part in get_args(plain) for member in _members(part)]
    return [plain]


class MessageType:
    """What a body is read as: a pydantic model, a dataclass, a ``TypedDict``, or a union or list of these.

    Attributes:
        of: the type itself.
        name: the type's name, for people.
    """

    def __init__(self, of: Any) -> None:
        """Prepare to read bodies as a type.

        Args:
            of: a type; ``Annotated[A | B, Field(discriminator="kind")]`` is one, too.

        Raises:
            InvalidConfiguration: pydantic cannot read it, or is not installed; or it may mean the body itself.
        """
        self.of = of
        self.name = name_of(of)
        if any(one in _BODY_ITSELF for one in _members(of)) or isinstance(of, TypeVar | str | dict):
            raise InvalidConfiguration(
                f"{self.name} is no message type: a pydantic model, a dataclass, a TypedDict, or a union of these is; "
                "for the body as it came, take the Message, and its body or text"
            )
        self._adapter = adapter_of(of, self.name)

    def __repr__(self) -> str:
        return f"MessageType({self.name})"

    def read(self, message: Message) -> Any:
        """Return a message's body as a new object of this type.

        Raises:
            MalformedMessage: the body is not JSON, or not of this type. The text quotes the validator, within a bounded
                length, and names fields but not their values.
        """
        try:
            return read_as(self._adapter, message.body)
        except Unreadable as error:
            raise MalformedMessage(f"the body of message {message.id} is no {self.name}: {error}") from None

    def json_schema(self, *, published: bool = False) -> dict[str, Any]:
        """Return the JSON Schema of bodies of this type.

        Args:
            published: the schema of what ``Outbox.publish`` writes, with computed fields; otherwise of what is read.

        Raises:
            InvalidConfiguration: pydantic has no schema for a part of it.
        """
        from pydantic.errors import PydanticUserError

        mode: Literal["serialization", "validation"] = "serialization" if published else "validation"
        try:
            schema = self._adapter.json_schema(mode=mode)
        except PydanticUserError as error:
            raise InvalidConfiguration(f"{self.name} has no JSON Schema: {error.message}") from error
        return {"$schema": _DIALECT, **schema}


class Unreadable(ValueError):
    """A body is not JSON, or not of a type; the text quotes the validator."""


def read_as(adapter: Any, body: bytes) -> Any:
    """Return a body as an object of the type of pydantic's adapter; raise ``Unreadable`` if it is not one."""
    from pydantic import ValidationError
    from pydantic_core import from_json

    words = ""
    if b"NaN" in body or b"Infinity" in body:
        try:
            from_json(body, allow_inf_nan=False)
        except ValueError as error:
            words = f"Invalid JSON: {error}"
    try:
        if not words:
            return adapter.validate_json(body)
    except ValidationError as error:
        words = _words(error)
    except RecursionError:
        words = "it is nested too deeply"
    raise Unreadable(words) from None  # not from the validator's error, which quotes the body


def adapter_of(of: Any, name: str) -> Any:
    """Return pydantic's ``TypeAdapter`` for a type; raise as ``MessageType`` does."""
    try:
        from pydantic import TypeAdapter
    except ImportError as error:
        raise InvalidConfiguration(
            f"message type {name} needs pydantic, which is not installed: {install_command('typed')}"
        ) from error
    try:
        adapter = TypeAdapter(of)
        if not adapter.pydantic_complete:  # a name in it is undefined; fail now, not at the first message
            adapter.rebuild(raise_errors=True)
    except Exception as error:  # a type's own code may decide how it is read
        raise InvalidConfiguration(f"{name} is no message type that pydantic can read: {_why(error)}") from error
    return adapter


def _why(error: Exception) -> str:
    """Return what is wrong, without pydantic's advice to authors of types, its links, and the values of objects."""
    text: str = getattr(error, "message", None) or str(error)
    if (unknown := _UNKNOWN_TYPE.match(text)) is not None:
        return f"it knows no {unknown['name']}" if unknown["name"] else "it knows no such type"
    return text


def name_of(of: Any) -> str:
    """Return the name of a type, without its module: ``Purchase | Refund``."""
    origin, parts = get_origin(of), get_args(of)
    if origin is Annotated:
        return name_of(parts[0])
    if origin in (Union, UnionType):
        return " | ".join(name_of(part) for part in parts)
    if origin is Literal:
        return str(of)
    if origin is None:
        return str(getattr(of, "__name__", f"a value of type {type(of).__name__}"))
    return f"{name_of(origin)}[{', '.join(map(name_of, parts))}]"


def _words(error: Any) -> str:
    """Return the validator's text: each field with its error, without the values."""
    count = error.error_count()
    if count > MAX_COUNTED_ERRORS:
        return f"{count:,} errors"
    told = error.errors(include_url=False, include_context=False, include_input=False)[:MAX_ERRORS]
    words = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}".removeprefix(": ") for one in told]
    more = [f"{count - MAX_ERRORS:,} more"] if count > MAX_ERRORS else []
    return "; ".join([*(_shortened(each) for each in words), *more])


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_ERROR_CHARACTERS else f"{text[: MAX_ERROR_CHARACTERS - 1]}…"


_BODY_ITSELF = (str, bytes, bytearray, memoryview, Message)
"""A handler annotated with one of these may mean the body as it came, or a string in JSON."""

_UNKNOWN_TYPE = re.compile(r"Unable to generate pydantic-core schema for (?:<class '(?P<name>[^']+)'>)?")

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
