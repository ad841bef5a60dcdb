"""The overview, and the page of one subscriber."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import RowMapping

from txbox.operations.pauses import Pause, read_pauses
from txbox.outbox.outbox import RELAY_SUBSCRIBER
from txbox.outcome import Outcome
from txbox.postgres.server import estimate_rows
from txbox.postgres.sql import with_moments
from txbox.postgres.sql_files import SqlFile
from txbox.status import ActivitySeries, Runway, WorkerStatus, read_activity, read_runway
from txbox.status.status import StatusStatements, read_conflicts
from txbox.status.workers import read_workers
from txbox_dashboard.pages.inbox_activity import InboxActivity, read_inbox_activity
from txbox_dashboard.reader import Reader
from txbox_dashboard.redaction import error_line
from txbox_dashboard.view import Page, Request

COUNTED = 1000
"""A subscriber's letters and failing messages are counted up to here."""

CHECKED = 2000
"""The most letters, and the most failing messages, that are checked for having been processed since."""

SUBSCRIBERS = 500
"""The most that are shown."""

SHOWN_FAILING = 20

OVERVIEW_HOURS = 3.0
SUBSCRIBER_HOURS = {"1 h": 1.0, "3 h": 3.0, "12 h": 12.0, "24 h": 24.0}
"""The ranges that a subscriber's chart may show."""

STRETCHES = 60

FAILURES = frozenset({Outcome.FAILED, Outcome.DEAD, Outcome.MISMATCH, Outcome.EXPIRED})


class OverviewStatements(SqlFile, file="overview.sql", fragments_of=StatusStatements):
    subscribers: str
    troubles: str
    failing: str
    letters_by_reason: str


@dataclass(frozen=True, slots=True)
class Line:
    """A subscriber in the overview.

    Attributes:
        workers: how many are at work.
        gone: how many workers have not reported in time.
        per_second: messages processed a second, by its workers' reports, or the inbox; None if that was not read.
        processed: the count in each stretch of the last hours, as in ``duplicates`` and ``failures``.
        by_inbox: no worker has reported in these hours, so the inbox was counted, and nothing else is known.
        waited_seconds: how long the oldest message of the last batches had waited when it came; None if not known.
        retrying: messages that wait for another attempt, counted up to the limit; None if not known.
        letters: dead letters that wait, likewise.
    """

    subscriber_id: str
    workers: int
    gone: int
    paused: Pause | None
    per_second: float | None
    processed: Sequence[int]
    duplicates: Sequence[int]
    failures: Sequence[int]
    waited_seconds: float | None
    retrying: int | None
    letters: int | None
    by_inbox: bool


def overview(request: Request) -> Page:
    """Show every subscriber: what it does, and what needs a person."""
    reader = request.reader
    sql = OverviewStatements.load(reader.schema, reader.prefix)
    place: Any = {"schema": reader.schema, "prefix": reader.prefix}
    workers = reader.read("the workers", lambda connection: read_workers(connection, **place)) or ()
    pauses = reader.read("what is paused", lambda connection: read_pauses(connection, **place)) or ()
    known = reader.rows("the subscribers", sql.subscribers, {"most": SUBSCRIBERS})
    every = [row["subscriber_id"] for row in known or ()] or sorted({one.subscriber_id for one in workers})
    names = [name for name in every if not name.startswith(f"{RELAY_SUBSCRIBER}:")]
    troubles = read_troubles(reader, names)
    activity = reader.read(
        "the last hours",
        lambda connection: read_activity(connection, "subscriber", hours=OVERVIEW_HOURS, stretches=STRETCHES, **place),
    )
    rows = reader.read("the inbox", lambda connection: estimate_rows(connection, sql.name_of("processed_message")))
    silent = _silent(names, activity)
    inbox = read_inbox_activity(reader, silent, hours=OVERVIEW_HOURS, stretches=STRETCHES) if silent else None
    series = {(one.name, one.figure): one.counts for one in activity or ()}
    lines = [
        _line(
            name,
            [one for one in workers if one.subscriber_id == name],
            next((one for one in pauses if (one.kind, one.name) == ("subscriber", name)), None),
            {figure: counts for (of, figure), counts in series.items() if of == name},
            troubles.get(name),
            inbox,
            by_inbox=name in silent,
        )
        for name in names
    ]
    processed = _added([one.processed for one in lines if one.processed])
    failed = _added([one.failures for one in lines if one.failures])
    return Page(
        "overview.html",
        {
            "lines": lines,
            "hours": OVERVIEW_HOURS,
            "counted": COUNTED,
            "inbox_rows": rows,
            "at_least": bool(silent) and not (inbox and inbox.exact),
            "times": inbox.times if inbox else times_of(activity or ()),
            "series": [one for one in (("processed", processed), ("failed", failed)) if one[1]],
            "per_second": sum(one.per_second or 0.0 for one in lines),
            "letters": _sum_of([one.letters for one in lines]),
            "retrying": _sum_of([one.retrying for one in lines]),
            "workers": sum(one.workers for one in lines),
            "gone": sum(one.gone for one in lines),
        },
    )


def subscriber(request: Request) -> Page:
    """Show one subscriber: its workers, what became of its messages, and how far back it remembers."""
    reader, name = request.reader, request.query.get("id", "")
    sql = OverviewStatements.load(reader.schema, reader.prefix)
    place: Any = {"schema": reader.schema, "prefix": reader.prefix}
    chosen = request.query.get("hours", "")
    hours = SUBSCRIBER_HOURS.get(chosen, OVERVIEW_HOURS)
    workers = reader.read("its workers", lambda connection: read_workers(connection, **place)) or ()
    pauses = reader.read("whether it is paused", lambda connection: read_pauses(connection, **place)) or ()
    activity = reader.read(
        "what became of its messages",
        lambda connection: read_activity(
            connection, "subscriber", name=name, hours=hours, stretches=STRETCHES, **place
        ),
    )
    silent = _silent([name], activity)
    inbox = read_inbox_activity(reader, silent, hours=hours, stretches=STRETCHES) if silent else None
    recorded = inbox.counts.get(name, ()) if inbox else ()
    runway: Runway | None = reader.read("what is kept", lambda connection: read_runway(connection, **place))
    wanted = {"subscriber_id": name}
    conflicts = reader.read(
        "conflicts of its handlers", lambda connection: read_conflicts(connection, subscriber_id=name, **place)
    )
    failing = reader.rows("what waits for another attempt", sql.failing, {**wanted, "limit": SHOWN_FAILING + 1}) or ()
    shown = [with_moments(row, "first_failed_at", "last_failed_at") for row in failing[:SHOWN_FAILING]]
    for one in shown:
        one["error"] = error_line(request.settings, one["error"], one["message_id"], name)
    letters = reader.rows("its dead letters", sql.letters_by_reason, {**wanted, "limit": COUNTED + 1})
    return Page(
        "subscriber.html",
        {
            "name": name,
            "workers": [one for one in workers if one.subscriber_id == name],
            "paused": next((one for one in pauses if (one.kind, one.name) == ("subscriber", name)), None),
            "choices": list(SUBSCRIBER_HOURS),
            "chosen": chosen if chosen in SUBSCRIBER_HOURS else "3 h",
            "series": [(Outcome.PROCESSED.value, recorded)] if recorded else _in_order(activity or ()),
            "times": inbox.times if inbox and recorded else times_of(activity or ()),
            "by_inbox": bool(recorded),
            "at_least": inbox is not None and not inbox.exact,
            "horizon": next((one for one in runway.horizons if one.subscriber_id == name), None) if runway else None,
            "runway": runway,
            "conflicts": conflicts or (),
            "failing": shown,
            "more_failing": len(failing) > SHOWN_FAILING,
            "letters": letters,
            "counted": COUNTED,
        },
    )


def read_troubles(reader: Reader, subscriber_ids: Sequence[str]) -> Mapping[str, RowMapping]:
    """Return by subscriber what waits for another attempt or for a person. It is empty if that was not read."""
    asked = {"limit": COUNTED + 1, "checked": CHECKED // max(len(subscriber_ids), 1)}
    sql = OverviewStatements.load(reader.schema, reader.prefix).troubles
    rows = reader.rows("dead letters", sql, {"subscriber_ids": list(subscriber_ids), **asked})
    return {row["subscriber_id"]: row for row in rows or ()}


def times_of(activity: Sequence[ActivitySeries]) -> list[float]:
    """Return when each stretch of a chart begins, in seconds since 1970."""
    if not activity:
        return []
    first = activity[0]
    begin = first.begins_at.timestamp()
    return [begin + place * first.stretch_seconds for place in range(len(first.counts))]


def _line(
    name: str,
    workers: Sequence[WorkerStatus],
    paused: Pause | None,
    series: Mapping[str, Sequence[int]],
    trouble: RowMapping | None,
    inbox: InboxActivity | None,
    *,
    by_inbox: bool,
) -> Line:
    alive = [one for one in workers if not one.stale]
    waits = [seconds for one in alive if (seconds := waited_seconds(one)) is not None]
    per_second: float | None = sum(one.per_second.get(Outcome.PROCESSED, 0.0) for one in alive)
    if by_inbox:
        series = {} if inbox is None else {Outcome.PROCESSED: inbox.counts.get(name, ())}
        per_second = None if inbox is None else inbox.last_minute[name] / 60
    return Line(
        subscriber_id=name,
        workers=len(alive),
        gone=len(workers) - len(alive),
        paused=paused,
        per_second=per_second,
        processed=series.get(Outcome.PROCESSED, ()),
        duplicates=series.get(Outcome.DUPLICATE, ()),
        failures=_added([counts for figure, counts in series.items() if figure in FAILURES]),
        waited_seconds=max(waits, default=None),
        retrying=None if trouble is None else trouble["retrying"],
        letters=None if trouble is None else trouble["letters"],
        by_inbox=by_inbox,
    )


def _silent(names: Sequence[str], activity: Sequence[ActivitySeries] | None) -> Sequence[str]:
    """Return the subscribers of which no worker has reported; none if the reports were not read."""
    reported = {one.name for one in activity or ()}
    return [] if activity is None else [name for name in names if name not in reported]


def waited_seconds(worker: WorkerStatus) -> float | None:
    """Return how long the oldest message of a worker's last batch had waited when it came; None if not known."""
    if worker.oldest_sent_at is None or worker.last_batch_at is None:
        return None
    return max((worker.last_batch_at - worker.oldest_sent_at).total_seconds(), 0.0)


def _added(several: Sequence[Sequence[int]]) -> Sequence[int]:
    return [sum(counts) for counts in zip(*several, strict=True)]


def _sum_of(counts: Sequence[int | None]) -> int | None:
    return None if any(count is None for count in counts) else sum(count or 0 for count in counts)


def _in_order(activity: Sequence[ActivitySeries]) -> list[tuple[str, Sequence[int]]]:
    """Return what a chart draws: the outcomes, in their own order."""
    order = [*(outcome.value for outcome in Outcome)]
    drawn = [one for one in activity if one.figure in order]
    return [(one.figure, one.counts) for one in sorted(drawn, key=lambda one: order.index(one.figure))]
