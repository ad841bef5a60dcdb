"""The page of the outbox."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, RowMapping

from txbox.messages.destinations import INBOX
from txbox.operations.pauses import Pause, read_pauses
from txbox.outbox.outbox import RELAY_SUBSCRIBER
from txbox.outbox.snapshot_holders import find_snapshot_holders, sees_all_sessions
from txbox.outbox.status import (
    STALE_SECONDS,
    DestinationStatus,
    OutboxStatusStatements,
    RelayStatus,
    is_relayed,
    with_estimates,
)
from txbox.postgres.sql import with_moments
from txbox.postgres.sql_files import SqlFile
from txbox.status import inbox_backlogs, read_activity
from txbox.status.workers import read_workers
from txbox_dashboard.pages.overview import COUNTED, read_troubles, times_of
from txbox_dashboard.redaction import error_line
from txbox_dashboard.view import Page, Request

LOOKED_AT = 3000
"""The most messages read. If there are more, each lane's first ones are: no destination, nor its oldest, is missed."""

LANES = 2000
"""The most lanes read; a destination has 64."""

SHOWN_KEYS = 100
HOURS = 3.0


class OutboxPageStatements(SqlFile, file="outbox.sql"):
    held_keys: str
    kept_rows: str


@dataclass(frozen=True, slots=True)
class Backlog:
    """The messages that wait.

    Attributes:
        exact: whether all were counted; otherwise the counts are lower bounds.
        estimate: how many there are in all, by Postgres's statistics.
    """

    destinations: Sequence[DestinationStatus]
    exact: bool
    estimate: int


def outbox(request: Request) -> Page:
    """Show where messages wait to be sent to, how long, which relays send them, and who blocks."""
    reader = request.reader
    place: Any = {"schema": reader.schema, "prefix": reader.prefix}
    sql = OutboxPageStatements.load(reader.schema, reader.prefix)
    status = OutboxStatusStatements.load(reader.schema, reader.prefix)
    relays: Sequence[RelayStatus] = reader.read("the relays", lambda connection: _relays(connection, status)) or ()
    backlog = reader.read("what waits", lambda connection: _backlog(connection, status))
    pauses: Sequence[Pause] = reader.read("what is paused", lambda connection: read_pauses(connection, **place)) or ()
    activity = (
        reader.read("the last hours", lambda connection: read_activity(connection, "destination", hours=HOURS, **place))
        or ()
    )
    total = (
        reader.read("the last hours", lambda connection: read_activity(connection, "outbox", hours=HOURS, **place))
        or ()
    )
    held = [dict(row) for row in reader.rows("held keys", sql.held_keys, {"limit": SHOWN_KEYS + 1}) or ()]
    for row in held:
        error, destination = row["error"] or "", row["destination"]
        row["error"] = error_line(request.settings, error, row["message_id"], destination)
    holders = reader.read("who blocks", find_snapshot_holders) or ()
    sees_all = reader.read("who may be seen", sees_all_sessions)
    kept = reader.rows("what was sent", sql.kept_rows)
    alive = [one for one in relays if not one.stale]
    found = backlog.destinations if backlog else ()
    workers = reader.read("the workers", lambda connection: read_workers(connection, **place)) or ()
    backlogs = {one.destination: one for one in inbox_backlogs(found, workers)}
    sent = {one.name: one.counts for one in activity if one.figure == "sent"}
    known = {one.destination: one for one in found}
    paused = {one.name: one for one in pauses if one.kind == "destination"}
    paused |= {to: one for one in pauses if one.kind == "subscriber" and (to := f"{INBOX}{one.name}") in known}
    names = sorted(
        {*known, *(one.name for one in activity), *paused, *(name for relay in alive for name in relay.outages)}
    )
    parkers = {name: f"{RELAY_SUBSCRIBER}:{name}" if is_relayed(name) else name.removeprefix(INBOX) for name in names}
    troubles = read_troubles(reader, list(parkers.values()))
    letters = {name: troubles[parker]["letters"] for name, parker in parkers.items() if parker in troubles}
    lines = [
        {
            "status": _shown(request, known.get(name, DestinationStatus(name)), alive),
            "sent": sent.get(name, ()),
            "paused": paused.get(name),
            "letters": letters.get(name),
            "backlog": backlogs.get(name),
            "subscriber": None if is_relayed(name) else name.removeprefix(INBOX),
        }
        for name in names
    ]
    return Page(
        "outbox.html",
        {
            "lines": lines,
            "counted": COUNTED,
            "looked_at": LOOKED_AT,
            "backlog": backlog,
            "relays": relays,
            "alive": len(alive),
            "relay_missing": not alive and any(is_relayed(one.destination) and one.oldest_seconds for one in found),
            "per_second": sum(relay.sent_per_second or 0.0 for relay in alive),
            "held": held[:SHOWN_KEYS],
            "more_held": len(held) > SHOWN_KEYS,
            "shown_keys": SHOWN_KEYS,
            "holders": holders,
            "sees_all": sees_all is not False,
            "kept": kept[0]["rows"] if kept else None,
            "hours": HOURS,
            "times": times_of(total),
            "series": sorted(((one.figure, one.counts) for one in total), key=lambda one: one[0] != "sent"),
            "oldest": max(
                (one.oldest_seconds for one in known.values() if one.oldest_seconds is not None), default=None
            ),
        },
    )


def _relays(connection: Connection, status: OutboxStatusStatements) -> list[RelayStatus]:
    rows = connection.exec_driver_sql(status.relays, {"stale_after": timedelta(seconds=STALE_SECONDS)}).mappings()
    return [RelayStatus(**with_moments(row, "started_at")) for row in rows]


def _backlog(connection: Connection, status: OutboxStatusStatements) -> Backlog:
    name = {"name": status.name_of("outbox_message")}
    estimate = int(connection.exec_driver_sql(status.row_estimates, name).one().live)
    if estimate < LOOKED_AT:
        rows = connection.exec_driver_sql(status.backlog, {"limit": LOOKED_AT + 1}).mappings().all()
        found = [DestinationStatus(**row) for row in rows]
        counted = sum(one.waiting + one.delayed + one.retrying for one in found)
        if counted <= LOOKED_AT:
            return Backlog(found, exact=True, estimate=counted)
    connection.exec_driver_sql(status.plan_by_index)
    limits = {"lanes": LANES, "limit": LOOKED_AT}
    rows = connection.exec_driver_sql(status.backlog_by_lane, limits).mappings().all()

    def read(statement: str, parameters: Mapping[str, Any]) -> Sequence[RowMapping]:
        return connection.exec_driver_sql(statement, dict(parameters)).mappings().all()

    found = with_estimates(read, status, [DestinationStatus(**row, exact=False) for row in rows])
    return Backlog(found, exact=False, estimate=max(estimate, LOOKED_AT))


def _shown(request: Request, one: DestinationStatus, relays: Sequence[RelayStatus]) -> DestinationStatus:
    """Return a destination's status with the reason why it cannot be reached, and its error as it may be shown."""
    if one.error:
        one = replace(one, error=error_line(request.settings, one.error, "", one.destination))
    outages = [relay.outages[one.destination] for relay in relays if one.destination in relay.outages]
    if not outages:
        return one
    why = error_line(request.settings, outages[0], "", one.destination)
    return replace(one, unreachable=why, unreachable_relays=len(outages))
