"""Ids in business entities: the row that a message changes remembers the message.

The pattern is Idempotent Consumer without a table of messages (C. Richardson, "Microservices Patterns", 2018, section
3.3.6: message ids in application tables). One UPDATE changes the row and its ids under a condition, so a message costs
neither a row nor a statement of its own. It fits where a message changes one row.

What happens when two transactions, A and B, apply the same message to one row::

    A updates ──────────────── A commits       B: duplicate     (at READ COMMITTED: B's condition is evaluated again
         B updates … waits for A ┘                               on the row that A has written)
                                               B: 40001, retry  (at REPEATABLE READ and SERIALIZABLE,
                                                                 if B's snapshot is older than A's commit)
    A updates ──────────────── A rolls back    B: first; A's id is gone with A's change
         B updates … waits for A ┘

B waits as long as any UPDATE waits for another one of the same row. A serialization failure is never taken for
"duplicate": it passes through, and the caller runs the transaction again.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import psycopg
from sqlalchemy import (
    ColumnElement,
    Connection,
    Label,
    Numeric,
    Table,
    Text,
    and_,
    case,
    cast,
    collate,
    false,
    func,
    inspect,
    literal,
    null,
    select,
    true,
    update,
)
from sqlalchemy import text as sql_text
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.exc import NoInspectionAvailable
from sqlalchemy.orm import InstrumentedAttribute, Mapped, Mapper, mapped_column

from txbox.entities.event_ids import EventId, check_kind, valid_event_id, valid_source
from txbox.errors import EntityMissing, InvalidConfiguration, TxboxError
from txbox.messages.message import valid_message_id
from txbox.postgres.drivers.psycopg_connection import is_psycopg
from txbox.postgres.transactions import ConnectionOrSession, in_transaction, is_session, refuse_for_coroutines

MAX_KEPT = 10_000
"""The most ids that a row keeps. Every update rewrites all of them; some hundreds are cheap."""

_TRIES = 10


class RecentMessageIds:
    """Mixin: the row keeps the ids of the last messages that changed it, for ``update_once``.

    ::

        class Account(RecentMessageIds, Base):
            __tablename__ = "account"
            recent_message_ids_kept = 200

            account_id: Mapped[str] = mapped_column(primary_key=True)
            cents: Mapped[int]

    Messages may come in any order. **The memory is bounded**: keep more ids than messages that can reach one row while
    any of them may still be redelivered (its queue's retention, redrives included). If there is no such number, use an
    ``Inbox``.

    The host's own migration adds the column to its table (``alembic revision --autogenerate`` sees it). A mapped
    dataclass, which SQLAlchemy lets inherit from dataclasses only, declares an attribute of this name and type itself,
    with ``init=False``; it needs no mixin.

    Attributes:
        recent_message_ids_kept: how many ids a row keeps, 1 to 10,000. A duplicate is applied again if at least so many
            other messages of the same row came in between. After it is lowered, the next update of a row cuts the
            row's ids.
        recent_message_ids: the ids, newest first.
    """

    recent_message_ids_kept: ClassVar[int] = 50

    recent_message_ids: Mapped[list[str]] = mapped_column(ARRAY(Text), nullable=False, server_default=sql_text("'{}'"))

    def __init_subclass__(cls, **keywords: Any) -> None:
        _kept(cls)
        super().__init_subclass__(**keywords)


class HighestEventIds:
    """Mixin: the row keeps the highest id of each source whose events change it, for ``update_if_newer``.

    It never forgets, however late a duplicate comes, but **it drops what comes late**. It fits where an event carries
    the whole new state (the later one makes up for the earlier), or where each source's events reach a row in order.
    Add the column, and declare it in a mapped dataclass, as for ``RecentMessageIds``.

    Attributes:
        highest_event_ids: by source, the highest id applied.
    """

    highest_event_ids: Mapped[dict[str, EventId]] = mapped_column(
        JSONB, nullable=False, server_default=sql_text("'{}'")
    )


def update_once(
    connection_or_session: ConnectionOrSession, entity: type[Any], key: Any, message_id: str, values: Mapping[Any, Any]
) -> bool:
    """Update one row unless the message has updated it before; one UPDATE in the caller's transaction.

    ::

        update_once(session, Account, "ann", message.id, {Account.cents: Account.cents + 500})

    This never begins, commits or rolls back the transaction; a rollback takes the id back. A session with autoflush is
    flushed first, and its object of the row reads the new values when it is next used. ORM events and version counters
    do not see the update: raise a version counter in ``values``.

    Args:
        connection_or_session: the caller's transaction.
        entity: a mapped class with ``RecentMessageIds``.
        key: the value of the row's primary key; a tuple for several columns; or a mapping by attribute.
        message_id: the id of the message.
        values: what to set, by attribute (``Account.cents``, or its name): values or SQL expressions. May be empty.

    Returns:
        True: applied. False: a duplicate; the row has this id.

    Raises:
        EntityMissing: no such row exists.
        NotInTransaction: the connection is in autocommit mode.
        InvalidMessageId: the id cannot be kept.
        InvalidConfiguration: the entity lacks the mixin, or ``key`` or ``values`` do not fit it.
        sqlalchemy.exc.OperationalError: among others a serialization failure (40001): run the transaction again.
    """
    row = _Row(entity, RecentMessageIds, "recent_message_ids", key)
    identifier = cast(literal(valid_message_id(message_id), Text), Text)
    # array_position allows nulls among the ids; NOT id = ANY(ids) would be null then.
    duplicate: ColumnElement[bool] = func.array_position(row.memory, identifier).is_not(None)
    ids = func.array_prepend(identifier, row.memory, type_=ARRAY(Text))[1 : _kept(entity)]
    return (
        row.update(connection_or_session, values, ids, ~duplicate, case((duplicate, true())).label("is_duplicate"))
        is None
    )


def update_if_newer(
    connection_or_session: ConnectionOrSession,
    entity: type[Any],
    key: Any,
    source: str,
    event_id: EventId,
    values: Mapping[Any, Any],
) -> bool:
    """Update one row if the event's id exceeds all earlier ones of its source; one UPDATE in the caller's transaction.

    ::

        update_if_newer(session, Product, 17, "catalogue", event["sequence"], {Product.price: event["price"]})

    The source must give out the ids for this row in order. Numbers are in order: a sequence per aggregate, a position
    in a log. Texts are if their bytes grow, as those of UUIDs of version 7 and ULIDs do, made by one process and in one
    spelling; random ids (UUIDs of version 4) are not. The other arguments are those of ``update_once``.

    Args:
        entity: a mapped class with ``HighestEventIds``.
        source: what gives out the ids; 1 to 200 bytes. Ids of different sources are not compared.
        event_id: a number of up to 38 digits, compared as a number, or a text, compared byte by byte.

    Returns:
        True: applied. False: a duplicate, or overtaken by an event with a higher id; it will never be applied.

    Raises:
        EntityMissing, NotInTransaction, sqlalchemy.exc.OperationalError: as for ``update_once``.
        InvalidMessageId: a text that cannot be kept.
        InvalidConfiguration: as for ``update_once``; or a number came after a text of the same source, or a text after
            a number.
    """
    row = _Row(entity, HighestEventIds, "highest_event_ids", key)
    name = cast(literal(valid_source(source), Text), Text)
    before = func.coalesce(row.memory, cast(sql_text("'{}'"), JSONB))
    highest = before.op("->", return_type=JSONB())(name)
    highest_text = before.op("->>", return_type=Text())(name)
    # The casts are inside the branches of a CASE, so that only numbers are cast to numbers.
    identifier: ColumnElement[Any]
    if isinstance(valid_event_id(event_id), str):
        identifier = cast(literal(event_id, Text), Text)
        newer = case((func.jsonb_typeof(highest) == "string", collate(highest_text, "C") < identifier), else_=false())
    else:
        identifier = cast(literal(str(event_id), Text), Numeric)
        newer = case((func.jsonb_typeof(highest) == "number", cast(highest_text, Numeric) < identifier), else_=false())
    first = func.coalesce(func.jsonb_typeof(highest), "null") == "null"
    applies = case((first, true()), else_=newer)
    ids = before.op("||", return_type=JSONB())(func.jsonb_build_object(name, identifier, type_=JSONB))
    settled = case((applies, null()), else_=highest)
    found = row.update(connection_or_session, values, ids, applies, settled.label("highest"))
    if found is None:
        return True
    check_kind(source, event_id, found)
    return False


class _Row:
    """One row of an entity, and the table that holds its ids: one of several if classes inherit by joins."""

    def __init__(self, entity: type[Any], mixin: type[Any], memory: str, key: Any) -> None:
        try:
            mapper = inspect(entity)
        except NoInspectionAvailable:
            mapper = None
        if not isinstance(mapper, Mapper) or memory not in mapper.column_attrs:
            raise InvalidConfiguration(f"entity must be a mapped class with {mixin.__name__}, not {entity!r}")
        self._mapper = mapper
        self.memory: ColumnElement[Any] = mapper.column_attrs[memory].columns[0]
        self._table = _table_of(self.memory)
        self._key = self._key_values(key)
        self._where = and_(*(self._column(name) == value for name, value in self._key.items()), self._kind())

    def update(
        self,
        connection_or_session: ConnectionOrSession,
        values: Mapping[Any, Any],
        memory: ColumnElement[Any],
        applies: ColumnElement[bool],
        settled: Label[Any],
    ) -> Any:
        """Update the row if ``applies`` holds and return None; otherwise return ``settled``.

        ``memory`` is the new value of the column of ids. ``settled`` is null while ``applies`` holds.
        """
        statement = update(self._table).where(self._where, applies).values(self._assignments(values, memory))
        connection = self._connection(connection_or_session)
        # If nothing was updated, it need not be a duplicate: at READ COMMITTED the row may have appeared in between.
        #
        #     UPDATE: no row ──────────────────────────────── SELECT: a row ── without the message's id
        #          another inserts the row, and commits ┘
        #
        # So the second statement reads the ids, and not only whether the row exists.
        for _ in range(_TRIES):
            if connection.execute(statement).rowcount:
                self._forget_values(connection_or_session)
                return None
            found = connection.execute(select(settled).where(self._where).select_from(self._table)).first()
            if found is None:
                raise EntityMissing(self._table.fullname, ", ".join(f"{n}={v!r}" for n, v in self._key.items()))
            if found[0] is not None:
                return found[0]
        raise TxboxError(
            f"an UPDATE of {self._table.fullname} changes nothing, although the row is there: a trigger or a policy of "
            "row level security keeps it from this user"
        )

    def _connection(self, connection_or_session: ConnectionOrSession) -> Connection:
        if isinstance(connection_or_session, psycopg.Connection) or is_psycopg(connection_or_session):
            raise TypeError("mapped classes need a Connection or Session of SQLAlchemy, not a connection of psycopg")
        if not is_session(connection_or_session):
            return in_transaction(connection_or_session)
        refuse_for_coroutines(connection_or_session, self._mapper)
        if connection_or_session.autoflush:  # as the session does before its own UPDATE
            connection_or_session.flush()
        return in_transaction(connection_or_session.connection(bind_arguments={"mapper": self._mapper}))

    def _forget_values(self, connection_or_session: ConnectionOrSession) -> None:
        """Expire the session's object of this row, so that it is read again.

        synchronize_session would compute ``cents + 500`` from the object's value, which differs from the row's if
        another transaction has committed since the object was read.
        """
        if is_session(connection_or_session):
            identity = self._mapper.identity_key_from_primary_key(tuple(self._key.values()))
            instance = connection_or_session.identity_map.get(identity)
            if instance is not None and (unchanged := inspect(instance).unmodified):
                connection_or_session.expire(instance, unchanged)

    def _kind(self) -> ColumnElement[bool]:
        """Return the condition that the row is of this class, as other classes may share its table."""
        discriminator = self._mapper.polymorphic_on
        if self._mapper.inherits is None or discriminator is None or discriminator not in self._table.c.values():
            return true()
        kinds = [
            each.polymorphic_identity for each in self._mapper.self_and_descendants if not each.polymorphic_abstract
        ]
        return discriminator.in_(kinds)

    def _key_values(self, key: Any) -> dict[str, Any]:
        """Return the key's values by attribute, in the order of the primary key."""
        names = [self._mapper.get_property_by_column(column).key for column in self._mapper.primary_key]
        if isinstance(key, Mapping):
            given = {self._name(name, "key"): value for name, value in key.items()}
            fits = given.keys() == set(names)
        else:
            row = key if isinstance(key, tuple) else (key,)
            given = dict(zip(names, row, strict=False))
            fits = len(row) == len(names)
        if not fits:
            raise InvalidConfiguration(f"key must have the values of the primary key, {', '.join(names)}, not {key!r}")
        return {name: given[name] for name in names}

    def _assignments(self, values: Mapping[Any, Any], memory: ColumnElement[Any]) -> dict[ColumnElement[Any], Any]:
        assignments = {}
        for attribute, value in values.items():
            name = self._name(attribute, "values")
            column = self._column(name)
            if column is self.memory or name in self._key:
                raise InvalidConfiguration(f"values must not set {name}: the key stays, and the memory is kept here")
            assignments[column] = value
        return assignments | {self.memory: memory}

    def _name(self, attribute: Any, argument: str) -> str:
        """Return an attribute's name, whether given by name, as an attribute or as a column."""
        if isinstance(attribute, str):
            name = attribute
        elif isinstance(attribute, InstrumentedAttribute):
            name = attribute.key
        elif isinstance(attribute, ColumnElement) and attribute in self._mapper.columns.values():
            name = self._mapper.get_property_by_column(attribute).key
        else:
            name = ""
        if name not in self._mapper.column_attrs:
            raise InvalidConfiguration(
                f"{argument} must name columns of {self._mapper.class_.__name__}, not {attribute!s:.100}"
            )
        return name

    def _column(self, name: str) -> ColumnElement[Any]:
        """Return an attribute's column in the table that is updated."""
        for column in self._mapper.column_attrs[name].columns:
            if getattr(column, "table", None) is self._table:
                return column
        raise InvalidConfiguration(
            f"{name} is not in {self._table.fullname}, the table that one UPDATE of {self._mapper.class_.__name__} "
            "can change: inherit the mixin where the changing columns are"
        )


def _kept(entity: type[Any]) -> int:
    kept = getattr(entity, "recent_message_ids_kept", RecentMessageIds.recent_message_ids_kept)
    if not isinstance(kept, int) or isinstance(kept, bool) or not 1 <= kept <= MAX_KEPT:
        raise InvalidConfiguration(
            f"{entity.__name__}.recent_message_ids_kept must be from 1 to {MAX_KEPT}, not {kept!r}"
        )
    return kept


def _table_of(column: Any) -> Table:
    table: Table = column.table
    return table
