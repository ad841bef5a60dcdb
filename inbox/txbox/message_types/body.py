"""A body to publish: text and bytes as they are, objects of message types as JSON."""

from dataclasses import is_dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol

from txbox.message import Message
from txbox.message_types.difference import difference
from txbox.message_types.message_type import Unreadable, adapter_of, name_of, read_as

MAX_WORDS_CHARACTERS = 1_000
"""Of what pydantic says of an object that cannot be written."""


class Model(Protocol):
    """An object of a pydantic model."""

    def model_dump_json(self, *, by_alias: bool, warnings: Literal["error"]) -> str:
        """Return it as JSON."""


class DataclassObject(Protocol):
    """An object of a dataclass."""

    @property
    def __dataclass_fields__(self) -> dict[str, Any]: ...


Body = bytes | str | Model | DataclassObject
"""What ``Outbox.publish`` takes as a body: bytes, text, or an object of a pydantic model or a dataclass."""


def written(body: Any) -> bytes:
    """Return what travels. Objects are JSON with their fields' aliases, which their own type has read again.

    Raises:
        TypeError: it is not a ``Body``; or a field of it has a value that is not of its type; or its type cannot read
            it again, or would read something else.
        InvalidConfiguration: pydantic is not installed, or does not know the type of a field.
    """
    if isinstance(body, str):
        return body.encode()
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body)
    kind: Any = type(body)
    name = kind.__name__
    if not _is_of_message_type(body):
        raise TypeError(
            f"a body is bytes, text, or an object of a pydantic model or a dataclass, not {name}; json.dumps "
            "makes text of most"
        )
    # A generic dataclass forgets its parameters, unless it was made by ``Box[int](…)``.
    adapter = _adapter(getattr(body, "__orig_class__", kind))
    from pydantic_core import PydanticSerializationError

    try:
        # A value that is not of its field's type is a warning by default, and a malformed message for its receiver.
        text = bytes(adapter.dump_json(body, by_alias=True, warnings="error"))
    except PydanticSerializationError as error:
        raise _refusal(name, str(error)) from error
    try:
        differs = difference(body, read_as(adapter, text), _dump)
    except Unreadable as error:
        raise _refusal(
            name, f"its type does not read it again ({error}): let what it writes and what it reads agree"
        ) from None
    except Exception as error:  # validators and comparisons are the host's
        raise _refusal(name, f"its type does not read it again: {type(error).__name__}: {error}") from error
    if differs is not None:
        raise _refusal(
            name,
            f"{differs or 'it'} would be another value when its type reads it: send one that JSON has, or say how it "
            "is written and read (field_serializer, ser_json_inf_nan, an alias for both)",
        )
    return text


def _refusal(name: str, why: str) -> TypeError:
    return TypeError(f"this {name} cannot be a body: {' '.join(why.split())[:MAX_WORDS_CHARACTERS]}")


def _dump(of: Any) -> Any:
    kind: Any = type(of)
    return _adapter(kind).dump_python(of, by_alias=False, warnings=False)


def _is_of_message_type(body: object) -> bool:
    """Whether it is an object of a dataclass, but not a message of ours, or of a pydantic model."""
    if is_dataclass(body):
        return not isinstance(body, type | Message)
    return hasattr(type(body), "__pydantic_serializer__")


@lru_cache(maxsize=256)
def _adapter(kind: Any) -> Any:
    return adapter_of(kind, name_of(kind))
