"""Events that the effect fails for, such as by a constraint of its target: found by applying ever smaller parts.

::

    all of a chunk fails ── none ─┬─ fails, too: it is the statements
                                  └─ half ─┬─ applied: stays for the parts that follow
                                           └─ fails ── half ── … ── one event: refused

Events that were refused are tried once more with all others applied, as long as that helps: one may need what another
one makes, such as the row that its foreign key is of.

What is applied on the way is rolled back by the caller, and the chunk is merged again without the refused events. So
the one that is merged is the statement over all of them, as where nothing is refused.
"""

from collections.abc import Callable, Sequence

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from txbox.postgres.sqlstates import sqlstate
from txbox_spark.merging.effects.effect_runner import ApplyFailed
from txbox_spark.merging.fresh_event import FRESH_EVENT, HELD_EVENT, fill_from_held, hold_fresh, keep_held
from txbox_spark.reading.columns import EventColumn
from txbox_spark.rejects.remarks import RejectedRow
from txbox_spark.runtime.explanations import ABOUT_DATA

ALL_REFUSED = 1_000
"""So many events are refused before one is applied; then the statements are wrong, not the events."""


def is_about_events(error: BaseException) -> bool:
    """Whether an effect has failed by a value or a constraint, so that it may succeed for other events."""
    return (sqlstate(error) or "")[:2] in ABOUT_DATA


def find_refused(
    connection: Connection, columns: Sequence[EventColumn], apply: Callable[[Connection], None]
) -> list[RejectedRow]:
    """Find the events in ``fresh_event`` that an effect fails for.

    Args:
        connection: in the chunk's transaction; what this does must be rolled back.
        columns: of ``fresh_event``.
        apply: applies what is in ``fresh_event``.

    Raises:
        ApplyFailed: it fails without any event, or no event can be applied.
        sqlalchemy.exc.DBAPIError, TxboxError: the effect fails for another reason.
    """
    connection.exec_driver_sql(hold_fresh())
    connection.exec_driver_sql(f"TRUNCATE {FRESH_EVENT}")
    apply(connection)
    tried = -1
    causes: dict[str, str] = {}
    while tried != len(causes):
        ids = connection.exec_driver_sql(f"SELECT message_id FROM {HELD_EVENT} ORDER BY message_id")  # noqa: S608
        found = list(ids.scalars())
        tried = len(found)
        causes = _try(connection, columns, apply, found)
        connection.exec_driver_sql(keep_held(), {"message_ids": list(causes)})
    return _rows(connection, causes)


def _try(
    connection: Connection, columns: Sequence[EventColumn], apply: Callable[[Connection], None], ids: list[str]
) -> dict[str, str]:
    """Apply events, which are sorted by id, and return why the refused ones are."""
    causes: dict[str, str] = {}
    applied = 0
    parts = [ids] if ids else []
    while parts:
        part = parts.pop()
        savepoint = connection.begin_nested()
        try:
            connection.exec_driver_sql(f"TRUNCATE {FRESH_EVENT}")
            connection.exec_driver_sql(fill_from_held(columns), {"first_id": part[0], "last_id": part[-1]})
            apply(connection)
        except (DBAPIError, ApplyFailed) as error:
            if not is_about_events(error):
                raise
            savepoint.rollback()
            if len(part) > 1:
                parts += [part[len(part) // 2 :], part[: len(part) // 2]]
                continue
            causes[part[0]] = str(error.why if isinstance(error, ApplyFailed) else error)
            if len(causes) >= ALL_REFUSED and not applied:
                raise
        else:
            savepoint.commit()
            applied += len(part)
    return causes


def _rows(connection: Connection, causes: dict[str, str]) -> list[RejectedRow]:
    """Return the events that are left, which are the refused ones."""
    found = connection.exec_driver_sql(
        f"SELECT message_id, to_jsonb(held)::text FROM {HELD_EVENT} AS held ORDER BY message_id"  # noqa: S608
    )
    return [
        RejectedRow(f"refused by the effect: {causes[message_id]}", message_id=message_id, event=event)
        for message_id, event in found
    ]
