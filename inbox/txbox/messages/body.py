"""A body to publish: text and bytes travel as they are, objects of message types as JSON."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from functools import lru_cache
from itertools import zip_longest
from typing import Any, Literal, Protocol

from txbox.messages.message import Message
from txbox.messages.message_type import Unreadable, adapter_of, name_of, read_as

Dump = Callable[[Any], Any]
"""Returns an object of a model or of a dataclass as a dictionary by field name, without the excluded fields."""

_PLAIN = (str, int, bool, type(None))
_MISSING = object()


def difference(sent: Any, read: Any, dump: Dump) -> str | None:
    """Return where two values first differ, as a path such as ``items.0.price``; None if they are alike.

    ``==`` does not suffice: dataclasses may be compared by identity or without some of their fields, and NaN differs
    from itself. It is also too strict: an excluded field does not travel, and JSON has one kind of list.

    Args:
        sent: an object.
        read: what was read back from it.
        dump: called with an object in which a field differs, as that field may be excluded.
    """
    path = _path(sent, read, dump)
    return None if path is None else ".".join(map(str, path))


def _path(sent: Any, read: Any, dump: Dump) -> tuple[Any, ...] | None:
    kind: Any = type(sent)
    if kind in _PLAIN:
        return None if sent == read else ()
    names = _field_names(kind)
    if names is not None:
        return _object_path(sent, read, dump, names) if kind is type(read) else ()
    parts = _parts(sent, read)
    if parts is None:
        return None if _are_alike(sent, read) else ()
    for name, one, other in parts:
        if (path := _path(one, other, dump)) is not None:
            return (name, *path)
    return None


def _object_path(sent: Any, read: Any, dump: Dump, names: tuple[str, ...]) -> tuple[Any, ...] | None:
    for name in names:
        path = _path(getattr(sent, name, _MISSING), getattr(read, name, _MISSING), dump)
        if path is not None and _travels(name, dump(sent)):
            return (name, *path)
    # What was read may have more fields: computed ones.
    extra, others = getattr(sent, "__pydantic_extra__", None), getattr(read, "__pydantic_extra__", None) or {}
    return _path(extra, {name: others[name] for name in extra if name in others}, dump) if extra else None


@lru_cache(maxsize=1_024)
def _field_names(kind: Any) -> tuple[str, ...] | None:
    """Return the field names of a model or a dataclass; None for other types."""
    if hasattr(kind, "__pydantic_fields__"):
        return tuple(kind.__pydantic_fields__)
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else None


def _travels(name: str, dumped: Any) -> bool:
    return name in dumped if isinstance(dumped, dict) else True


def _parts(sent: Any, read: Any) -> Iterator[tuple[Any, Any, Any]] | None:
    """Return the parts of two containers side by side, each with its name; None for other values."""
    if isinstance(sent, list | tuple) and isinstance(read, list | tuple):
        pairs = zip_longest(sent, read, fillvalue=_MISSING)
        return ((index, one, other) for index, (one, other) in enumerate(pairs))
    if isinstance(sent, Mapping) and isinstance(read, Mapping):
        return ((name, sent.get(name, _MISSING), read.get(name, _MISSING)) for name in {**sent, **read})
    return None


def _are_alike(sent: Any, read: Any) -> bool:
    if isinstance(sent, datetime) and isinstance(read, datetime) and sent.tzinfo and read.tzinfo:
        # Across two zones, == is False in the hour that comes twice (PEP 495).
        return sent.astimezone(UTC) == read.astimezone(UTC)
    return bool(sent == read) or bool(sent != sent and read != read)  # the latter: NaN


MAX_WORDS_CHARACTERS = 1_000
"""How much of pydantic's text is kept for an object that cannot be written."""


class Model(Protocol):
    """An object of a pydantic model."""

    def model_dump_json(self, *, by_alias: bool, warnings: Literal["error"]) -> str:
        """Return it as JSON."""


class DataclassObject(Protocol):
    @property
    def __dataclass_fields__(self) -> dict[str, Any]: ...


Body = bytes | str | Model | DataclassObject
"""What ``Outbox.publish`` takes as a body: bytes, text, or an object of a pydantic model or a dataclass."""


def written(body: Any) -> bytes:
    """Return the bytes that travel. Objects become JSON with their fields' aliases, which their type must read back.

    Raises:
        TypeError: it is not a ``Body``; a field's value is not of its type; or its type cannot read it back, or would
            read something else.
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
    # A generic dataclass forgets its parameters, unless it was made as ``Box[int](…)``.
    adapter = _adapter(getattr(body, "__orig_class__", kind))
    from pydantic_core import PydanticSerializationError

    try:
        # By default pydantic only warns of a value that is not of its field's type; the receiver finds it malformed.
        text = bytes(adapter.dump_json(body, by_alias=True, warnings="error"))
    except PydanticSerializationError as error:
        raise _refusal(name, str(error)) from error
    try:
        differs = difference(body, read_as(adapter, text), _dump)
    except Unreadable as error:
        raise _refusal(
            name, f"its type does not read it again ({error}): let what it writes and what it reads agree"
        ) from None
    except Exception as error:  # validators and comparisons are the host's code
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
    """Whether it is an object of a pydantic model, or of a dataclass other than our ``Message``."""
    if is_dataclass(body):
        return not isinstance(body, type | Message)
    return hasattr(type(body), "__pydantic_serializer__")


@lru_cache(maxsize=256)
def _adapter(kind: Any) -> Any:
    return adapter_of(kind, name_of(kind))
