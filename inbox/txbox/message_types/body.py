"""A body to publish: text and bytes as they are, objects of message types as JSON."""

from dataclasses import is_dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol

from txbox.message import Message
from txbox.message_types.message_type import adapter_of

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
    """Return what travels. Objects are JSON with their fields' aliases, so that the same type reads it again.

    Raises:
        TypeError: it is not a ``Body``, or a field of it has a value that is not of its type.
        InvalidConfiguration: pydantic is not installed, or does not know the type of a field.
    """
    if isinstance(body, str):
        return body.encode()
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body)
    kind: Any = type(body)
    if not _is_of_message_type(body):
        raise TypeError(
            f"a body is bytes, text, or an object of a pydantic model or a dataclass, not {kind.__name__}; json.dumps "
            "makes text of most"
        )
    adapter = _adapter(kind)
    from pydantic_core import PydanticSerializationError

    try:
        # A value that is not of its field's type is a warning by default, and a malformed message for its receiver.
        text = adapter.dump_json(body, by_alias=True, warnings="error")
    except PydanticSerializationError as error:
        raise TypeError(f"this {kind.__name__} cannot be a body: {str(error)[:MAX_WORDS_CHARACTERS]}") from error
    return bytes(text)


def _is_of_message_type(body: object) -> bool:
    """Whether it is an object of a dataclass, but not a message of ours, or of a pydantic model."""
    if is_dataclass(body):
        return not isinstance(body, type | Message)
    return hasattr(type(body), "__pydantic_serializer__")


@lru_cache(maxsize=256)
def _adapter(kind: Any) -> Any:
    return adapter_of(kind, kind.__name__)
