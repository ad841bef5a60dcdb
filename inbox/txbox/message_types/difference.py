"""The difference between an object and what its type has read of its JSON: what a receiver would have instead.

``==`` is not enough: dataclasses may be compared by identity or without some of their fields, and NaN differs from
itself. It is too much, too: a field that is excluded is not to travel, and JSON has one kind of list.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from functools import lru_cache
from itertools import zip_longest
from typing import Any

Dump = Callable[[Any], Any]
"""Returns an object of a model or of a dataclass as a dictionary by its fields' names, without the excluded ones."""

_PLAIN = (str, int, bool, type(None))
_MISSING = object()


def difference(sent: Any, read: Any, dump: Dump) -> str | None:
    """Return where two values first differ, as a path such as ``items.0.price``; None if they are alike.

    Args:
        sent: an object.
        read: what was read of it.
        dump: is asked about an object in which a field differs: one that is excluded may.
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
    # What was read may have more: computed fields.
    extra, others = getattr(sent, "__pydantic_extra__", None), getattr(read, "__pydantic_extra__", None) or {}
    return _path(extra, {name: others[name] for name in extra if name in others}, dump) if extra else None


@lru_cache(maxsize=1_024)
def _field_names(kind: Any) -> tuple[str, ...] | None:
    """Return the names of the fields of a model or a dataclass; None of other types."""
    if hasattr(kind, "__pydantic_fields__"):
        return tuple(kind.__pydantic_fields__)
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else None


def _travels(name: str, dumped: Any) -> bool:
    return name in dumped if isinstance(dumped, dict) else True


def _parts(sent: Any, read: Any) -> Iterator[tuple[Any, Any, Any]] | None:
    """Return what two containers are made of, side by side, each part with its name; None of other values."""
    if isinstance(sent, list | tuple) and isinstance(read, list | tuple):
        pairs = zip_longest(sent, read, fillvalue=_MISSING)
        return ((index, one, other) for index, (one, other) in enumerate(pairs))
    if isinstance(sent, Mapping) and isinstance(read, Mapping):
        return ((name, sent.get(name, _MISSING), read.get(name, _MISSING)) for name in {**sent, **read})
    return None


def _are_alike(sent: Any, read: Any) -> bool:
    if isinstance(sent, datetime) and isinstance(read, datetime) and sent.tzinfo and read.tzinfo:
        # Of two zones, == says that they differ in the hour that comes twice (PEP 495).
        return sent.astimezone(UTC) == read.astimezone(UTC)
    return bool(sent == read) or bool(sent != sent and read != read)  # the latter: NaN
