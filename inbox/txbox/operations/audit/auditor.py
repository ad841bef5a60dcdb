"""Audits: check conservation from one outbox to one inbox, which may be in different databases.

Every message that an outbox has sent and keeps (``Relay(keep_sent=…)``) is in the inbox of its subscriber: processed,
parked, expired, discarded or on its way; and nothing else is there. Both sides have an index that begins with the
message id. So the audit walks both in stretches of ids, each of about ``STRETCH_ROWS`` rows::

    after ── both sides: the id so many rows further; the smaller one is the edge
      │
    counts and digests of the stretch, for each of 1,024 buckets, on both sides ── equal ── next
      │ some differ
    the ids in these buckets, on both sides ── on both: fine ── on one alone: judged again ── named, or explained

The servers compute the digests; only ids in buckets that differ are transferred. One stretch is held in memory.

Nothing is locked, and no snapshot is held longer than a statement. Races are harmless, because an id is named only
after it was looked up again, after both sides were read::

    sent, not in the inbox   one snapshot of the inbox: its row, letters, failures and lease. A message that was sent
                             lately, or redriven lately, is in flight; one that has failed lately is tried again.
    in the inbox, not sent   what was processed lately is not judged. Then the outbox, of which rows move to the sent
                             messages in one transaction: first the outbox, then the letters and what was sent.

An id that the outbox has forgotten, or the inbox may have forgotten, is not judged. What moves these limits (the oldest
kept message, the subscriber's horizon) is read after the rows were looked for.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from txbox.backoff import Backoff
from txbox.errors import InvalidConfiguration
from txbox.instrumentation import Audited, Hook, emit
from txbox.instrumentation.logs import log_event
from txbox.operations.audit.report import COUNTS, AuditReport, Finding, FindingKind, Stretch, id_from, time_of
from txbox.operations.audit.sides import (
    STATEMENT_TIMEOUT,
    AuditedDatabase,
    Range,
    RecordedSide,
    Sent,
    known,
    subscribers,
)
from txbox.postgres.sql import moment
from txbox.postgres.sqlstates import QUERY_CANCELED, sqlstate

IN_FLIGHT = timedelta(minutes=15)
"""What was sent less than this ago is not missed yet. Also the largest clock difference that the audit allows for."""

STRETCH_ROWS = 20_000
"""Rows per stretch, on the side that has more; half a second on a cold disk, 30 milliseconds on a warm one."""

RETRY = timedelta(seconds=Backoff().longest_seconds)
"""The longest pause before a failed message is delivered again. It may then be in flight once more."""

SMALLEST_ROWS = 500
"""Smallest stretch: it is made no smaller if its statements take too long."""

LIMIT = 100
"""Messages named, and stretches listed, by default."""

PAUSE_SHARE = 0.25
"""Pause after a stretch, as a share of the time it took, to spare the servers."""

PROGRESS_SECONDS = 10.0


Moment = datetime | timedelta
"""A moment with its time zone; or how long ago, by the inbox's clock."""


def audit(
    outbox: Engine,
    destinations: Sequence[str],
    inbox: Engine,
    subscriber_id: str,
    *,
    outbox_schema: str | None = None,
    outbox_prefix: str = "",
    inbox_schema: str | None = None,
    inbox_prefix: str = "",
    since: Moment | None = None,
    in_flight: timedelta = IN_FLIGHT,
    shared: bool = False,
    limit: int = LIMIT,
    hooks: Iterable[Hook] = (),
) -> AuditReport:
    """Compare what an outbox has sent to some destinations with a subscriber's inbox, and balance that inbox.

    It only reads, also from replicas that lag less than ``in_flight``. Emits ``Audited``.

    Args:
        outbox: the database of the outbox, whose relays keep what they send.
        destinations: from which the subscriber receives, as they were given to ``publish``.
        inbox: the database of the inbox; may be the same.
        subscriber_id: the inbox's subscriber.
        outbox_schema: the schema of the outbox's tables; None leaves it to the search path.
        outbox_prefix: what their names start with.
        inbox_schema: the schema of the inbox's tables; None leaves it to the search path.
        inbox_prefix: what their names start with.
        since: a moment, or how long ago. Compare only ids made since then, as far as ids begin with their time.
        in_flight: what was sent less than this ago may be on its way. Longer than the queue's backlog takes, and than
            the longest pause of a worker whose ``backoff`` is not the default.
        shared: whether others also send to this subscriber; what this outbox has not sent is then not foreign.
        limit: how many messages to name, and stretches to list.
        hooks: called with the event.

    Raises:
        NothingKept: the outbox keeps no sent messages.
        InvalidConfiguration: an argument cannot work.
        SchemaMissing: a table does not exist.
    """
    if isinstance(destinations, str) or not destinations:
        raise InvalidConfiguration("destinations must be a sequence of at least one destination")
    sent = Sent(AuditedDatabase(outbox, outbox_schema, outbox_prefix), tuple(destinations), shared)
    recorded = RecordedSide(AuditedDatabase(inbox, inbox_schema, inbox_prefix), subscriber_id)
    return _Audit(recorded, sent, since, in_flight, limit, hooks).run()


def audit_inbox(
    inbox: Engine,
    subscriber_id: str | None = None,
    *,
    schema: str | None = None,
    prefix: str = "",
    since: Moment | None = None,
    limit: int = LIMIT,
    hooks: Iterable[Hook] = (),
) -> list[AuditReport]:
    """Balance an inbox by itself: recorded = processed + parked + expired + discarded, and letters against the inbox.

    Nothing that was sent is compared, so this finds no missing, overdue or foreign messages
    (``AuditReport.not_judged``).

    Args:
        inbox: its database.
        subscriber_id: only this one, if it has left a trace; None: each that has.
        schema: of the tables; None leaves it to the search path.
        prefix: what their names start with.
        since: as in ``audit``.
        limit: as in ``audit``, for each report.
        hooks: as in ``audit``.

    Raises:
        SchemaMissing: a table does not exist.
    """
    database = AuditedDatabase(inbox, schema, prefix)
    names = [name for name in subscribers(database) if subscriber_id in (None, name)]
    return [_Audit(RecordedSide(database, name), None, since, timedelta(0), limit, hooks).run() for name in names]


class _Audit:
    """One audit of one subscriber; used once."""

    def __init__(
        self,
        recorded: RecordedSide,
        sent: Sent | None,
        since: Moment | None,
        in_flight: timedelta,
        limit: int,
        hooks: Iterable[Hook],
    ) -> None:
        if limit < 0:
            raise InvalidConfiguration(f"limit must not be negative, not {limit!r}")
        if isinstance(since, datetime) and since.tzinfo is None:
            raise InvalidConfiguration(f"since needs a zone: {since} is another moment in each of them")
        if in_flight < timedelta(0):
            raise InvalidConfiguration(f"in_flight must not be negative, not {in_flight!r}")
        self._recorded, self._sent = recorded, sent
        self._since, self._in_flight, self._limit, self._hooks = since, in_flight, limit, tuple(hooks)
        self._counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        self._findings: list[Finding] = []
        self._differing: list[Stretch] = []
        self._not_compared = set(() if sent is None else sent.destinations)
        self._stretches = 0
        self._now = datetime.now(UTC)  # the inbox's clock, once it is read
        self._sent_before = datetime.max.replace(tzinfo=UTC)  # what was sent later is in flight
        self._kept_since: datetime | None = None
        self._horizon: datetime | None = None

    def run(self) -> AuditReport:
        begun = time.monotonic()
        last = self._begin()
        since = self._now - self._since if isinstance(self._since, timedelta) else self._since
        after = "" if since is None else id_from(since)
        told_at, stretch_rows = begun, STRETCH_ROWS
        while after < last:
            stretch_begun = time.monotonic()
            try:
                stretch = self._next(after, last, stretch_rows)
                self._compare(stretch)
            except DBAPIError as error:
                if sqlstate(error) != QUERY_CANCELED or stretch_rows <= SMALLEST_ROWS:
                    raise
                stretch_rows //= 4
                _log.info("%d rows took longer than %s: going on in smaller parts", stretch_rows * 4, STATEMENT_TIMEOUT)
                continue
            after = stretch.upto
            now = time.monotonic()
            if now - told_at > PROGRESS_SECONDS:
                told_at = now
                _log.info("audit of %s: %s", self._recorded.subscriber_id, self._progress(after))
            time.sleep((now - stretch_begun) * PAUSE_SHARE)
        self._judge_letters()
        if self._sent is not None and since is not None and since < self._now and self._not_compared:
            self._not_compared -= self._sent.quiet(Range("", last), self._not_compared)
        destinations = () if self._sent is None else self._sent.destinations
        limits = (since, self._kept_since, None if self._sent is None else self._sent.judged_since)
        report = AuditReport(
            self._recorded.subscriber_id,
            destinations,
            dict(self._counts),
            tuple(self._findings),
            tuple(self._differing),
            self._stretches,
            self._kept_since,
            self._horizon,
            self._in_flight.total_seconds(),
            round(time.monotonic() - begun, 3),
            tuple(name for name in destinations if name in self._not_compared),
            max((at for at in limits if at is not None), default=None) if destinations else None,
        )
        source = ", ".join(report.destinations) or self._recorded.database.sql.name_of("processed_message")
        emit(
            (log_event, *self._hooks),
            Audited(self._recorded.subscriber_id, source, report.counts, report.balanced, report.seconds),
        )
        return report

    def _begin(self) -> str:
        """Read where the audit begins, the outbox first; return the greatest id."""
        last = "" if self._sent is None else self._sent.begin(self._counts)
        self._recorded.check()
        row = self._recorded.begin()
        self._now, self._horizon = known(row.now), moment(row.horizon)
        if self._sent is not None:
            self._kept_since = self._sent.kept_since
            self._recorded.judged_since = self._kept_since - self._in_flight  # nothing kept was processed before
            self._sent_before = min(self._sent.now, moment(row.paused_at) or self._sent.now) - self._in_flight
            # For messages sent before this, the inbox may have forgotten its rows.
            self._sent.judged_since = self._horizon and self._horizon + self._in_flight
        return max(last, row.last_id or "")

    def _next(self, after: str, upto: str, rows: int) -> Range:
        """Return the next stretch, of at most about ``rows`` rows on each side."""
        sides = [self._recorded] if self._sent is None else [self._sent, self._recorded]
        edges = [edge for side in sides if (edge := side.edge(Range(after, upto), rows)) is not None]
        return Range(after, min(edges, default=upto))

    def _compare(self, stretch: Range) -> None:
        """Compare a stretch and count what it has; count nothing if a statement fails."""
        counts: Counter[str] = Counter()
        # The outbox first: what is sent and processed meanwhile is recent.
        sent = {} if self._sent is None else self._sent.digests(stretch)
        recorded = self._recorded.digests(stretch)
        if self._sent is not None and self._not_compared:
            self._not_compared -= self._sent.destinations_in(stretch, self._not_compared)
        opened = []
        for bucket in sent.keys() | recorded.keys():
            ours, theirs = sent.get(bucket, _NOTHING), recorded.get(bucket, _NOTHING)
            unusual = ours.sent_again or theirs.doubled or theirs.unparked
            counts.update(_named(_OF_SENT, ours))
            counts.update(_named(_OF_RECORDED, theirs))
            differs = self._sent is not None and (ours.ids, ours.digest) != (theirs.ids, theirs.digest)
            if differs or (unusual and len(self._findings) < self._limit):
                opened.append(bucket)
            else:
                counts.update(_named(_STATES, theirs), sent=ours.ids)
        findings = self._open(stretch, opened, counts) if opened else []
        self._note(stretch, counts, findings, *(sum(row.ids for row in side.values()) for side in (sent, recorded)))

    def _note(self, stretch: Range, counts: Counter[str], findings: list[Finding], sent: int, recorded: int) -> None:
        self._stretches += 1
        self._counts.update(counts)
        self._findings += findings[: self._limit - len(self._findings)]
        faults = {kind.value: counts[kind.value] for kind in FindingKind if counts[kind.value]}
        if faults.keys() - {"sent_again"} and len(self._differing) < self._limit:
            times = time_of(stretch.after), time_of(stretch.upto)
            self._differing.append(Stretch(stretch.after, stretch.upto, *times, sent, recorded, faults))

    def _open(self, stretch: Range, buckets: Sequence[int], counts: Counter[str]) -> list[Finding]:
        """Compare the ids in some buckets; look up again those that are on one side only."""
        findings: list[Finding] = []
        sent_at: dict[str, int] = {}
        processed_at: dict[str, int] = {}
        states: dict[str, str] = {}
        for message_id, at, judged, again in () if self._sent is None else self._sent.ids(stretch, buckets):
            if judged:
                sent_at[message_id] = at
            if again:
                findings.append(Finding(FindingKind.SENT_AGAIN, message_id, moment(at)))
        for message_id, at, judged, state, doubled in self._recorded.ids(stretch, buckets):
            if judged:
                processed_at[message_id], states[message_id] = at, state
            if doubled:
                findings.append(Finding(FindingKind.DOUBLED, message_id, moment(at)))
            if state == "unparked":
                findings.append(Finding(FindingKind.UNPARKED, message_id, moment(at)))
        both = states.keys() if self._sent is None else sent_at.keys() & states.keys()
        counts.update(states[one] for one in both if states[one] != "unparked")  # these are counted already
        if self._sent is not None:
            counts["sent"] += len(sent_at)
            missing = {one: known(sent_at[one]) for one in sent_at.keys() - states.keys()}
            foreign = {one: known(processed_at[one]) for one in states.keys() - sent_at.keys()}
            findings += self._judge_missing(missing, counts)
            findings += self._judge_foreign(self._sent, foreign, counts)
        return sorted(findings, key=lambda finding: finding.message_id)

    def _judge_missing(self, sent_at: Mapping[str, datetime], counts: Counter[str]) -> list[Finding]:
        """Count what became of messages that were not found in the inbox; return the missing and overdue ones."""
        missing: dict[str, FindingKind] = {}
        for message_id, state in self._recorded.states(sent_at, self._in_flight, RETRY):
            lost = state in (FindingKind.MISSING, FindingKind.OVERDUE)
            if lost and sent_at[message_id] > self._sent_before:
                counts["in_flight"] += 1
            elif lost:
                missing[message_id] = FindingKind(state)
            elif state != "unparked":
                counts[state] += 1
        if not missing:
            return []
        horizon = moment(self._recorded.begin().horizon)  # it moves before anything is forgotten
        judged = [name for name in missing if horizon is None or sent_at[name] >= horizon + self._in_flight]
        counts["forgotten"] += len(missing) - len(judged)
        counts["sent"] -= len(missing) - len(judged)
        counts.update(missing[name].value for name in judged)
        return [Finding(missing[name], name, sent_at[name]) for name in judged]

    def _judge_foreign(self, side: Sent, processed_at: Mapping[str, datetime], counts: Counter[str]) -> list[Finding]:
        """Count why ids of the inbox are not among those sent; return the foreign ones."""
        if side.shared:
            counts["others"] += len(processed_at)
            return []
        recent = {name for name, at in processed_at.items() if at > self._now - self._in_flight}
        counts["recent"] += len(recent)
        # Two looks at what was sent: the first leaves few to search the outbox for, the second is what counts.
        suspects = self._unknown(side, processed_at.keys() - recent, counts)
        if suspects:
            waiting = side.waiting(suspects)
            counts["unsettled"] += len(waiting)
            suspects = self._unknown(side, set(suspects) - waiting, counts)
        if not suspects:
            return []
        kept_since = side.read_kept_since() + self._in_flight
        parked_at = self._recorded.first_parked(suspects)
        foreign = [
            name
            for name in suspects
            if (time_of(name) or min(processed_at[name], parked_at.get(name, processed_at[name]))) >= kept_since
        ]
        counts["not_kept"] += len(suspects) - len(foreign)
        counts["foreign"] += len(foreign)
        return [Finding(FindingKind.FOREIGN, name, processed_at[name]) for name in foreign]

    @staticmethod
    def _unknown(side: Sent, message_ids: Iterable[str], counts: Counter[str]) -> list[str]:
        """Return which ids this outbox has never sent; count those that it has sent elsewhere."""
        wanted = sorted(message_ids)
        found = side.known(wanted)
        counts["elsewhere"] += sum(not here for here in found.values())
        return [message_id for message_id in wanted if message_id not in found]

    def _judge_letters(self) -> None:
        """Compare the dead letters that wait with the inbox."""
        for kind, message_id, at in self._recorded.letter_faults():
            self._counts[kind] += 1
            if len(self._findings) < self._limit:
                self._findings.append(Finding(FindingKind(kind), message_id, moment(at)))

    def _progress(self, after: str) -> str:
        upto = time_of(after)
        names = ("sent", "missing", "foreign") if self._sent else ("processed", "parked")
        figures = ", ".join(f"{self._counts[name]:,} {name}" for name in names)
        return figures + (f", up to {upto:%Y-%m-%d %H:%M:%S}" if upto else "")


def _named(counts: Iterable[str], bucket: Any) -> dict[str, int]:
    return {name: getattr(bucket, name) for name in counts}


_OF_SENT = ("forgotten", "sent_again")
_OF_RECORDED = ("not_kept", "doubled", "unparked")
_STATES = ("processed", "parked", "expired", "discarded")
"""States of ids in the inbox; counted here if a bucket is not opened, otherwise id by id."""

_NOTHING: Any = SimpleNamespace(**dict.fromkeys(("digest", "ids", *COUNTS), 0))
"""The counts of an empty bucket."""

_log = logging.getLogger("txbox.operations.audit")
