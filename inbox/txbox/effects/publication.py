"""Publication: an effect's last statement returns rows, which go into the outbox as messages in the same transaction.

::

    INSERT INTO account … SELECT … FROM fresh_event … RETURNING customer_id AS key, jsonb_build_object(…) AS body
                                                                 └─ one message for each row

Columns are identified by name, so their order is free: see ``COLUMNS``.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import Any

import psycopg
from psycopg import adapters
from psycopg.pq import Escaping
from psycopg.types.datetime import IntervalLoader
from sqlalchemy import Connection

from txbox.errors import EffectFailed, InvalidConfiguration, NotSendable
from txbox.messages.destinations import scheme
from txbox.outbox import Outbox, Outgoing

COLUMNS = {
    "body": ("text", "varchar", "json", "jsonb", "bytea"),
    "key": ("text", "varchar", "uuid", "int2", "int4", "int8"),
    "destination": ("text", "varchar"),
    "headers": ("jsonb", "json", "text", "varchar"),
    "message_id": ("text", "varchar", "uuid", "int2", "int4", "int8"),
    "delay": ("interval", "int2", "int4", "int8", "numeric", "float4", "float8"),
}
"""The columns of messages, as in ``Outgoing``, and the types that each may have; ``body`` is required."""

PUBLISHED_AT_ONCE = 10_000
"""The most messages in one statement; a chunk of a bulk load may return a million."""


@dataclass(frozen=True, slots=True)
class ReturnedRows:
    """The rows that a statement returned, as the text that Postgres sent.

    Attributes:
        columns: the name and the OID of the type of each column; empty for a statement without a result.
        rows: the values, in the order of the columns; None: null. They can be read once.
        encoding: that of the values.
        driver: the connection they come from; its settings say how an interval is written.
    """

    columns: Sequence[tuple[str, int]]
    rows: Iterable[Sequence[bytes | None]]
    encoding: str = "utf-8"
    driver: psycopg.Connection[Any] | None = None

    @classmethod
    def of(cls, connection: Connection, result: Any) -> "ReturnedRows":
        """Return the rows of a libpq result; None stands for a statement without one."""
        if result is None:
            return cls((), ())
        driver: Any = connection.connection.dbapi_connection
        encoding = "utf-8" if driver.info.encoding == "ascii" else driver.info.encoding  # SQL_ASCII changes nothing
        numbers = range(result.nfields)
        columns = [(result.fname(number).decode(encoding), result.ftype(number)) for number in numbers]
        rows = ([result.get_value(row, number) for number in numbers] for row in range(result.ntuples))
        return cls(columns, rows, encoding, driver)


class Publication:
    """Where an effect's messages go: the outbox that takes them, and the destination of those that name none."""

    def __init__(self, outbox: Outbox, destination: str | None) -> None:
        """Raise unless the arguments can work; ``destination`` is as in ``Outgoing``, None: each row names one.

        Raises:
            InvalidConfiguration: one of them cannot work.
        """
        if not isinstance(outbox, Outbox):
            raise InvalidConfiguration(f"outbox must be an Outbox, not {type(outbox).__name__}")
        if destination is not None:
            if not isinstance(destination, str):
                raise InvalidConfiguration(f"destination must be text, not {type(destination).__name__}")
            try:
                scheme(destination)
            except NotSendable as error:
                raise InvalidConfiguration(f"destination: {error}") from error
        self.outbox = outbox
        self.destination = destination

    def publish(self, connection: Connection, returned: ReturnedRows) -> None:
        """Publish a message for each row.

        Raises:
            EffectFailed: the rows are not messages; the text names the column.
            NotSendable, InvalidMessageId, InvalidConfiguration, SchemaMissing: as for ``Outbox.publish``.
        """
        messages = self.messages(returned)
        while some := list(islice(messages, PUBLISHED_AT_ONCE)):
            self.outbox.publish_many(connection, some)

    def messages(self, returned: ReturnedRows) -> Iterator[Outgoing]:
        """Return the rows as messages.

        Raises:
            EffectFailed: the rows are not messages.
        """
        self._check(returned)
        return (self._message(row, returned) for row in returned.rows)

    def _check(self, returned: ReturnedRows) -> None:
        names = [name for name, _ in returned.columns]
        if "body" not in names:
            raise EffectFailed(
                "its last statement returns no column body; a publishing effect ends in a statement that returns a row "
                "for each message, such as SELECT … or INSERT … RETURNING, with the body of the message"
            )
        for name, type_ in returned.columns:
            if name not in COLUMNS:
                raise EffectFailed(
                    f"its last statement returns an unknown column {name}; those of messages are {', '.join(COLUMNS)}"
                )
            if names.count(name) > 1:
                raise EffectFailed(f"its last statement returns the column {name} twice")
            if type_ not in _TYPES[name]:
                known = adapters.types.get(type_)
                raise EffectFailed(
                    f"its last statement returns a column {name} of type {known.name if known else type_}, which has "
                    f"to be one of {', '.join(COLUMNS[name])}"
                )
        if self.destination is None and "destination" not in names:
            raise EffectFailed("its last statement returns no column destination, and the effect has no destination")

    def _message(self, row: Sequence[bytes | None], returned: ReturnedRows) -> Outgoing:
        given: dict[str, Any] = {
            name: None if value is None else _read(name, type_, value, returned)
            for (name, type_), value in zip(returned.columns, row, strict=True)
        }
        if given["body"] is None:
            raise EffectFailed("its last statement returns a row whose column body is null")
        if given.setdefault("destination", None) is None:
            given["destination"] = self.destination
        if given["destination"] is None:
            raise EffectFailed("its last statement returns a row whose column destination is null")
        return Outgoing(**given)


def _read(name: str, type_: int, value: bytes, returned: ReturnedRows) -> object:
    if type_ == _BYTEA:
        return Escaping().unescape_bytea(value)
    if type_ == _INTERVAL:
        return _span(value, returned)
    text = value.decode(returned.encoding)
    if name == "delay":
        return float(text)
    return _headers(text) if name == "headers" else text


def _span(value: bytes, returned: ReturnedRows) -> timedelta:
    try:
        return IntervalLoader(_INTERVAL, returned.driver).load(value)
    except (psycopg.Error, NotImplementedError) as error:  # an interval style that psycopg does not know
        raise EffectFailed(
            f"its last statement returns a column delay that cannot be read: {error}; give seconds instead, "
            "extract(epoch FROM …)"
        ) from error


def _headers(text: str) -> dict[str, str] | None:
    try:
        headers = json.loads(text)
    except ValueError:
        headers = text
    if headers is None:
        return None
    if not isinstance(headers, dict) or not all(isinstance(value, str) for value in headers.values()):
        raise EffectFailed("its last statement returns a column headers that is not a JSON object of texts")
    return headers


_TYPES = {name: frozenset(adapters.types.get_oid(one) for one in types) for name, types in COLUMNS.items()}
_BYTEA, _INTERVAL = adapters.types.get_oid("bytea"), adapters.types.get_oid("interval")
