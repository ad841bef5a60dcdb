"""Parses and validates the options of format txbox, which Spark passes to a data source as texts."""

import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import URL
from sqlalchemy.exc import SQLAlchemyError

from txbox import Inbox, InvalidConfiguration, SqlEffect, TxboxError
from txbox.postgres.urls import database_url
from txbox_spark.merging.merge_plan import FailedChunk
from txbox_spark.options import Apply, ValidLoadOptions, text_options

FORMAT = "txbox"
"""The name of the format, also in errors."""

COUNT, FAIL = ON_REJECTED = ("count", "fail")
"""What to do with rows that cannot be loaded: count them, or fail the write."""

_OF_LOAD = (
    "schema", "prefix", "force", "sent_at", "apply_expired", "lock_seconds", "stalled_seconds", "effects_seconds",
)  # fmt: skip
"""Options with the same meaning as for a bulk load."""

WRITE_OPTIONS = ("url", "subscriber", "message_id", "apply", "fields", "types", "on_rejected", *_OF_LOAD)
READ_OPTIONS = ("url", "table", "subscriber", "schema", "prefix", "partitions")

CHECKPOINT = "checkpointlocation"
OF_STREAMS = (CHECKPOINT, "queryname")
"""Spark's own options, which it also passes to every streaming sink."""


@dataclass(frozen=True, slots=True)
class WriteOptions:
    load: ValidLoadOptions
    fails_on_rejected: bool  # whether rows that cannot be loaded end the write
    checkpoint: str | None = None
    """The stream's checkpoint, which no other stream has; None if it is not among the options."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    database: URL
    table: str
    subscriber_id: str | None  # None means all subscribers
    schema: str | None
    prefix: str
    partitions: int | None  # how many tasks read; None means that the table's size decides


def write_options(given: Mapping[str, str]) -> WriteOptions:
    """Return the options of a write.

    Raises:
        InvalidConfiguration: an option is unknown, missing or invalid.
    """
    options = _known(given, WRITE_OPTIONS, "write")
    for name in ("url", "subscriber", "message_id", "apply"):
        if not options.get(name, "").strip():
            raise InvalidConfiguration(f"format {FORMAT}: a write needs option({name!r}, …)")
    on_rejected = options.get("on_rejected", COUNT)
    if on_rejected not in ON_REJECTED:
        raise InvalidConfiguration(f"format {FORMAT}: on_rejected is {' or '.join(ON_REJECTED)}, not {on_rejected!r}")
    kinds = {name: text_options()[name][1] if name in text_options() else str for name in _OF_LOAD}
    load = ValidLoadOptions(
        of=f"format {FORMAT}",
        url=options["url"],
        subscriber_id=options["subscriber"],
        message_id=options["message_id"],
        apply=_effect(options["apply"], options.get("fields")),
        column_types=_types(options["types"]) if "types" in options else None,
        **{name: _read(name, options[name], kind) for name, kind in kinds.items() if name in options},
    )
    checkpoint = next((value for name, value in given.items() if name.lower() == CHECKPOINT), None)
    return WriteOptions(load, on_rejected == FAIL, None if checkpoint is None else _place(checkpoint))


def read_options(given: Mapping[str, str], tables: tuple[str, ...]) -> ReadOptions:
    """Return the options for reading one of ``tables``.

    Raises:
        InvalidConfiguration: an option is unknown, missing or invalid.
    """
    options = _known(given, READ_OPTIONS, "read")
    table = options.get("table")
    if table not in tables:
        raise InvalidConfiguration(f"format {FORMAT}: option('table', …) is one of {', '.join(tables)}, not {table!r}")
    if "url" not in options:
        raise InvalidConfiguration(f"format {FORMAT}: a read needs option('url', …)")
    partitions = _read("partitions", options["partitions"], int) if "partitions" in options else None
    if partitions is not None and partitions < 1:
        raise InvalidConfiguration(f"format {FORMAT}: partitions must be at least 1, not {partitions}")
    subscriber = options.get("subscriber")
    if subscriber is not None:
        Inbox(subscriber)  # raises if the name is invalid
    return ReadOptions(
        database_url(options["url"]), table, subscriber, options.get("schema"), options.get("prefix", ""), partitions
    )


def _known(given: Mapping[str, str], known: tuple[str, ...], verb: str) -> dict[str, str]:
    """Return the options by their names in lower case; Spark passes them in lower case, or as written."""
    options = {name.lower(): value for name, value in given.items() if name.lower() not in OF_STREAMS}
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, 1, 0.5)
            did_you_mean = f"did you mean {near[0]}? " if near else ""
            raise InvalidConfiguration(
                f"format {FORMAT}: {name} is no option of a {verb}; {did_you_mean}There are {', '.join(known)}"
            )
    return options


def _effect(apply: str, fields: str | None) -> Apply:
    """Return the effect: statements from a file or from the option itself, or a function that the executors import."""
    if _FUNCTION.fullmatch(apply.strip()):
        if fields is not None:
            raise InvalidConfiguration(f"format {FORMAT}: fields are of statements, and apply names a function")
        return _function(*apply.strip().split(":"))
    if _FILE.fullmatch(apply.strip()):
        path = Path(apply.strip())
        if fields is not None:
            return SqlEffect(path, fields=fields)
        try:
            return path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidConfiguration(f"format {FORMAT}: apply: the driver cannot read {path}: {error}") from None
    return apply if fields is None else SqlEffect.of(apply, fields=fields)


def _function(module: str, name: str) -> Callable[..., object]:
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InvalidConfiguration(
            f"format {FORMAT}: apply: {module}:{name} cannot be imported; driver and executors need it on their Python "
            f"path: {error}"
        ) from error
    if not callable(found):
        raise InvalidConfiguration(f"format {FORMAT}: apply: {module}:{name} is no function")
    return found  # type: ignore[no-any-return]


def _place(checkpoint: str) -> str:
    """Return a checkpoint's location, with this machine's name if it may be a local file."""
    scheme, colon, path = checkpoint.partition(":")
    if colon and scheme != "file":
        return checkpoint
    return f"{socket.gethostname()}:{os.path.abspath(path if colon else checkpoint)}"  # noqa: PTH100 - no link is followed


def _types(text: str) -> dict[str, str]:
    """Parse ``order_id=uuid, price=numeric(12,2)``; a comma within parentheses belongs to the type."""
    types = {}
    for part in re.split(r",(?![^(]*\))", text):
        name, equals, type_ = part.partition("=")
        if not equals or not name.strip() or not type_.strip():
            raise InvalidConfiguration(f"format {FORMAT}: types are as in order_id=uuid, payload=jsonb; not {text!r}")
        types[name.strip()] = type_.strip()
    return types


def _read(name: str, value: str, kind: type[Any]) -> Any:
    """Return an option's value as its type: a text, a flag or a number."""
    if kind is bool:
        if value.lower() not in ("true", "false"):
            raise InvalidConfiguration(f"format {FORMAT}: {name} is true or false, not {value!r}")
        return value.lower() == "true"
    try:
        return kind(value)
    except ValueError:
        raise InvalidConfiguration(f"format {FORMAT}: {name} is a number, not {value!r}") from None


_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_FILE = re.compile(r"[^\n;]+\.sql")


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Raise the block's errors as one line, without their causes, which may quote values, statements or parts of URLs.

    Spark shows whole tracebacks, with every cause. ``what`` says what failed, for errors of Postgres.
    """
    try:
        yield
    except TxboxError as error:
        raise error from None
    except (SQLAlchemyError, psycopg.Error) as error:
        raise TxboxError(f"{what}: {FailedChunk.of(0, error).error}") from None
