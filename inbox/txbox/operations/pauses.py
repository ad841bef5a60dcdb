"""Pause a subscriber or a destination, and resume it.

A pause is a row, so it survives every restart. It takes effect when workers and relays next read it, within seconds::

    pause(engine, subscriber_id="billing", by="anna", note="the ledger is being repaired")
    …
    resume(engine, subscriber_id="billing")

A paused worker finishes the transactions under way, hands back what it has not begun, and receives nothing. A relay
leaves the messages of a paused destination where they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from sqlalchemy import Connection, Engine

from txbox.errors import InvalidConfiguration
from txbox.messages.destinations import INBOX
from txbox.outbox.lanes import lanes_of
from txbox.outbox.outbox import RELAY_SUBSCRIBER
from txbox.postgres.sql import with_moments
from txbox.postgres.sql_files import SqlFile
from txbox.postgres.transactions import bounded_wait, check_table, short_transaction
from txbox.text import storable

__all__ = ["Pause", "find_named", "pause", "read_pauses", "resume"]


Kind = Literal["subscriber", "destination"]


class PauseStatements(SqlFile, file="pauses.sql"):
    pause: str
    resume: str
    pauses: str
    is_subscriber: str
    is_destination: str


@dataclass(frozen=True, slots=True)
class Pause:
    """A subscriber or a destination that is paused.

    Attributes:
        kind: ``subscriber`` or ``destination``.
        name: the subscriber_id, or the destination.
        paused_by: who asked for it, for people to read.
        note: why; None if no reason was given.
        paused_at: since when, by the database's clock.
    """

    kind: Kind
    name: str
    paused_by: str
    note: str | None
    paused_at: datetime | None


def pause(
    engine: Engine,
    *,
    subscriber_id: str | None = None,
    destination: str | None = None,
    by: str,
    note: str | None = None,
    schema: str | None = None,
    prefix: str = "",
) -> bool:
    """Pause a subscriber or a destination. Return False if it is already paused; that pause stays as it is.

    Args:
        engine: the database of the subscriber's inbox, or of the outbox.
        subscriber_id: whose workers stop processing.
        destination: to which relays stop sending, as it was published; not ``inbox:SUBSCRIBER``.
        by: who asks for it, for people to read.
        note: why.
        schema: the Postgres schema that holds the tables; None leaves it to the search path.
        prefix: what the tables' names start with.

    Raises:
        InvalidConfiguration: not exactly one of the two is named, or no relay sends to the destination.
        SchemaMissing: our tables do not exist.
        TableLocked: another session has locked one of them.
    """
    kind, name = _named(subscriber_id, destination)
    if kind == "destination" and name.startswith(INBOX):
        raise InvalidConfiguration(
            f"no relay sends to {name}, its workers take it from the outbox: pause the subscriber {name[len(INBOX) :]}"
        )
    values = {"kind": kind, "name": name, "paused_by": storable(by), "note": note and storable(note)}
    sql = PauseStatements.load(schema, prefix)
    with short_transaction(engine) as connection:
        check_table(connection, sql.tables.paused)
        with bounded_wait(connection, sql.tables.paused):
            return connection.exec_driver_sql(sql.pause, values).rowcount > 0


def resume(
    engine: Engine,
    *,
    subscriber_id: str | None = None,
    destination: str | None = None,
    schema: str | None = None,
    prefix: str = "",
) -> bool:
    """End a pause; return False if there was none. Takes the arguments of ``pause`` and raises its errors."""
    kind, name = _named(subscriber_id, destination)
    sql = PauseStatements.load(schema, prefix)
    with short_transaction(engine) as connection:
        check_table(connection, sql.tables.paused)
        with bounded_wait(connection, sql.tables.paused):
            return connection.exec_driver_sql(sql.resume, {"kind": kind, "name": name}).rowcount > 0


def read_pauses(connection: Connection, *, schema: str | None = None, prefix: str = "") -> tuple[Pause, ...]:
    """Return everything that is paused; raise ``SchemaMissing`` if our tables do not exist."""
    sql = PauseStatements.load(schema, prefix)
    check_table(connection, sql.tables.paused)
    rows = connection.exec_driver_sql(sql.pauses).mappings()
    return tuple(Pause(**with_moments(row, "paused_at")) for row in rows)


def find_named(connection: Connection, name: str, *, schema: str | None = None, prefix: str = "") -> Sequence[Kind]:
    """Return what has this name: a subscriber, a destination, both or nothing, judged by the traces they leave.

    A destination leaves no trace if nothing waits for it and no relay has sent to it for a day.
    """
    sql = PauseStatements.load(schema, prefix)
    ours = sql.tables
    inbox = (ours.worker_report, ours.processed_message, ours.message_failure, ours.dead_letter, ours.message_lease)
    for table in (*inbox, ours.outbox_message, ours.outbox_relay):
        check_table(connection, table)
    lanes, inbox_lanes = lanes_of(name), lanes_of(f"{INBOX}{name}")
    of_destination = {
        "name": name,
        "first_lane": lanes[0],
        "last_lane": lanes[-1],
        "letters_of": f"{RELAY_SUBSCRIBER}:{name}",
    }
    of_subscriber = {"name": name, "first_lane": inbox_lanes[0], "last_lane": inbox_lanes[-1]}
    found: list[Kind] = []
    if connection.exec_driver_sql(sql.is_subscriber, of_subscriber).scalar_one():
        found.append("subscriber")
    if connection.exec_driver_sql(sql.is_destination, of_destination).scalar_one():
        found.append("destination")
    return found


def _named(subscriber_id: str | None, destination: str | None) -> tuple[Kind, str]:
    if subscriber_id and not destination:
        return "subscriber", subscriber_id
    if destination and not subscriber_id:
        return "destination", destination
    raise InvalidConfiguration("name either a subscriber_id or a destination, and not both")
