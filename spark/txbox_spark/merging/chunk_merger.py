"""Merging one chunk, or several that follow each other, in one transaction: what is first is recorded and applied.

::

    claim the chunk ── events in place ── SAVEPOINT ─┬─ fresh_event: what is not in the inbox, one of each id, sorted
                                            ▲        ├─ plain sorted INSERT into the inbox
                                            │        ├─ the caller's statements over fresh_event
                                            │        └─ counts into the ledger ── COMMIT
                              23505, 40001, 40P01, 55P03: back to the savepoint
                                                     classes 22 and 23, of the effect: back, and ``refused_events``,
                                                     which records nothing; then all but the refused once more

To find the processed ids first, by a join, and to insert the rest sorted and without ON CONFLICT took a third of the
time of INSERT … ON CONFLICT … RETURNING. If a live worker records one of the ids in between, that is 23505, a unique
violation; then the chunk is merged once more with ON CONFLICT.

What is waited for, and why nothing waits in a circle:

- inbox rows: inserted in sorted order, by us and by the workers, before any other row is locked;
- the caller's rows: chunks of one subscriber apply their effects one at a time, behind an advisory lock of the
  transaction, since the order in which the caller's statements lock is not known; two chunks cannot wait for each
  other;
- a live worker, or a load of another subscriber, that locks the caller's rows in another order may meet a chunk in a
  deadlock. Postgres ends one of the two; it is run again.

Chunks run at READ COMMITTED, whatever the role's default. There each statement sees what has committed before it, so
going back to the savepoint is enough, and the events need not be read again.

How long a chunk can keep others waiting, if its executor or its server process

- is frozen, or cut off, between two statements: ``stalled_seconds``; then Postgres ends its session;
- is killed while a statement runs: ten seconds; then Postgres notices that the client is gone;
- waits for a row that another transaction has locked: ``stalled_seconds``; then it releases its locks, and tries again;
- hangs in the server: ``effects_seconds``; then chunks that wait for it give up, and name the process.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from txbox import TxboxError
from txbox.backoff import Backoff
from txbox.postgres.server import SERVER
from txbox.postgres.sqlstates import LOCK_NOT_AVAILABLE, UNIQUE_VIOLATION, is_retryable, sqlstate
from txbox.postgres.transactions import driver_cursor
from txbox.status.blocked_loads import run_lock
from txbox_spark.merging.effect_runner import ApplyFailed, apply_effects
from txbox_spark.merging.fresh_event import FRESH_EVENT, create_fresh, drop_expired, drop_refused, insert_fresh
from txbox_spark.merging.merge_plan import ChunkCounts, MergePlan, TriedIds
from txbox_spark.merging.refused_events import GoodEventsFailed, find_refused, is_about_events
from txbox_spark.rejects.remarks import RejectedRow, refuse_too_many

MERGE_ATTEMPTS = 10
"""How often a chunk is merged that meets a deadlock or a serialization failure."""

MERGE_BACKOFF = Backoff(first_seconds=0.1, longest_seconds=2.0)
"""The pauses between the attempts."""

MOST_SEARCHES = 3
"""How often a chunk is searched for events that its effect fails for, if others change meanwhile what it meets."""

SORT_MEMORY = "128MB"
"""The work_mem of a chunk's transaction: enough to sort a million events of a usual width without the disk."""

HOLDER_POLL_SECONDS = 10.0
"""How often it checks whether that is still the same one."""


class ChunkHeld(TxboxError):
    """Another transaction has claimed the chunk, and does not end; another attempt may succeed."""


class EffectsHeld(TxboxError):
    """Another chunk of the subscriber applies its events for longer than ``effects_seconds``."""


class Merged(NamedTuple):
    """What a merge came to."""

    applied: int  # events that were first
    locked_at: float  # when it began to lock what others may wait for, by ``time.monotonic``


def begin_chunk(connection: Connection, plan: MergePlan, chunk: int) -> bool:
    """Begin a chunk's transaction by claiming the chunk; return False if it is done: then roll back.

    Raises:
        ChunkHeld: another transaction has claimed it, and does not end.
    """
    settings = {"work_mem": SORT_MEMORY, "stalled": plan.stalled, "run_lock": run_lock(plan.run_id)}
    connection.exec_driver_sql(plan.sql.prepare_session, settings)
    return claim_chunk(connection, plan, chunk)


def claim_chunk(connection: Connection, plan: MergePlan, chunk: int) -> bool:
    """Claim one more chunk in a transaction that has begun with the chunk before it; return False if it is done.

    It must not have merged anything yet: attempts claim in ascending order before they lock anything else, so they do
    not wait in a circle.

    Raises:
        ChunkHeld: another transaction has claimed it, and does not end.
    """
    claim = {"run_id": plan.run_id, "chunk": chunk}
    try:
        return connection.exec_driver_sql(plan.sql.claim_chunk, claim).rowcount == 1
    except DBAPIError as error:
        if sqlstate(error) != LOCK_NOT_AVAILABLE:
            raise
        raise ChunkHeld(
            f"another attempt at chunk {chunk} has held it for {plan.stalled_seconds:.0f} s; while "
            "one waits for it, `txbox status` names its server process; SELECT pg_terminate_backend(PID) ends it"
        ) from error


def merge_chunk(
    connection: Connection,
    plan: MergePlan,
    chunk: int,
    ids: tuple[str, str | None],
    counts: ChunkCounts,
    *,
    staged: str | None = None,
    tried: TriedIds | None = None,
    pause: Callable[[float], object] = time.sleep,
) -> Merged:
    """Record and apply the events of a chunk that are first, all but the COMMIT.

    Args:
        connection: in the transaction that has claimed the chunk.
        plan, chunk, counts: the run's, the chunk's number, and the counts of its rows; or those of the first of several
            chunks that follow each other, which are then merged as one.
        ids: its first possible id, and the first one beyond it.
        staged: the table, or query in parentheses, that holds its events, quoted; None: ``fresh_event`` does, one of
            each id and sorted.
        tried: what its ids have told; then ``fresh_event`` has the events of ``tried.unprocessed`` alone, and
            ``counts`` is of those.
        pause: waits for so many seconds between two attempts.

    Raises:
        sqlalchemy.exc.DBAPIError, TxboxError: a statement, or the effect, has failed; roll back.
    """
    if tried is None:
        parked = count_parked(connection, plan, staged or FRESH_EVENT)
    elif counts.distinct + counts.refused == len(tried.unprocessed):
        parked = tried.parked
    else:
        raise TxboxError("the source has changed since its ids were read: begin a new run")
    raced = False
    searching = False  # the effect fails for some of the events: it is tried, to find them
    searches = 0
    refused: dict[str, RejectedRow] = {}
    failures = 0
    while True:
        savepoint = connection.begin_nested()
        try:
            ended = _merge(connection, plan, ids, counts.distinct, staged, refused, raced=raced, searching=searching)
        except _Raced:
            savepoint.rollback()
            raced = True
            _log.info(
                "bulk load %s, chunk %d: another transaction has recorded some of the events; merging once more",
                plan.run_id,
                chunk,
            )
        except (DBAPIError, ApplyFailed) as error:
            failures += 1
            again = is_retryable(error) or sqlstate(error) == LOCK_NOT_AVAILABLE
            lost = isinstance(error, DBAPIError) and error.connection_invalidated
            fails = not searching or isinstance(error, GoodEventsFailed)
            by_events = fails and is_about_events(error) and searches < MOST_SEARCHES
            if lost or not (again or by_events) or failures == MERGE_ATTEMPTS:
                raise
            savepoint.rollback()
            if by_events:
                searching = True
                searches += 1
                continue
            _log.info("bulk load %s, chunk %d: %s; merging again", plan.run_id, chunk, sqlstate(error))
            pause(MERGE_BACKOFF.seconds(failures))
        else:
            if not searching:
                savepoint.commit()
                break
            savepoint.rollback()
            searching = False
            refused |= {str(one.message_id): one for one in ended.refused}
    applied, expired = ended.applied, ended.expired
    if expired.events:
        _log.warning(
            "bulk load %s, chunk %d: %d events were sent before the horizon of %s, so it cannot be told whether they "
            "were processed, and they are not applied: %s",
            plan.run_id,
            chunk,
            expired.events,
            plan.subscriber_id,
            ", ".join(expired.sample),
        )
    if tried is not None:
        counts = tried.counts.without(counts.refused, counts.remarks)
    if ended.refused:
        with driver_cursor(connection) as cursor:
            counts = counts.without(len(ended.refused), plan.keep_rejected(cursor, chunk, ended.refused))
    _settle(connection, plan, chunk, counts, applied, parked, expired.events)
    return Merged(applied, ended.locked_at)


def settle_processed_chunk(
    connection: Connection, plan: MergePlan, chunk: int, ids: tuple[str, str | None], counts: ChunkCounts, limit: int
) -> TriedIds:
    """Settle a chunk of which every id is in the inbox; otherwise return ``limit`` that are not: then roll back.

    The other arguments are those of ``merge_chunk``; ``fresh_event`` has the distinct ids alone.
    """
    values = {**_range_values(plan, ids), "limit": limit}
    parked = count_parked(connection, plan, FRESH_EVENT)
    connection.exec_driver_sql(plan.sql.avoid_hashes)
    unprocessed = tuple(connection.exec_driver_sql(plan.sql.unprocessed, values).scalars())
    tried = TriedIds(counts, parked, unprocessed)
    if not unprocessed:
        _settle(connection, plan, chunk, counts, applied=0, parked=tried.parked)
    return tried


def count_parked(connection: Connection, plan: MergePlan, events: str) -> int:
    """Count a chunk's events that wait as dead letters."""
    subscriber = {"subscriber_id": plan.subscriber_id}
    if connection.exec_driver_sql(plan.sql.any_parked, subscriber).fetchone() is None:
        return 0
    # There are few letters, and no index on the events.
    count = f"SELECT count(DISTINCT event.message_id) FROM {events} AS event {plan.sql.parked_events}"  # noqa: S608 - quoted
    return int(connection.exec_driver_sql(count, subscriber).scalar_one())


def _settle(
    connection: Connection,
    plan: MergePlan,
    chunk: int,
    counts: ChunkCounts,
    applied: int,
    parked: int,
    expired: int = 0,
) -> None:
    sample = json.dumps(counts.remarks.as_json()) if counts.remarks else None
    settled = {
        "rows_read": counts.read,
        "rows_rejected": counts.rejected,
        "already_processed": counts.distinct - applied - expired,
        "applied": applied,
        "parked": parked,
        "expired": expired,
        "rejected_sample": sample,
        "run_id": plan.run_id,
        "chunk": chunk,
    }
    connection.exec_driver_sql(plan.sql.settle_chunk, settled)
    if counts.rejected and plan.most_rejected is not None:
        run = {"run_id": plan.run_id}
        rejected = connection.exec_driver_sql(plan.sql.rejected_so_far, run).scalar_one()
        refuse_too_many(rejected, plan.most_rejected, counts.remarks)


def _range_values(plan: MergePlan, ids: tuple[str, str | None]) -> dict[str, str | None]:
    first, end = ids
    return {"subscriber_id": plan.subscriber_id, "first_id": first, "end_id": end}


class ExpiredEvents(NamedTuple):
    """Events that are too old to judge, and some of their ids."""

    events: int
    sample: tuple[str, ...]


def drop_expired_events(connection: Connection, plan: MergePlan) -> ExpiredEvents:
    """Leave no event in ``fresh_event`` that is too old to judge."""
    subscriber = {"subscriber_id": plan.subscriber_id}
    if plan.apply_expired or connection.exec_driver_sql(plan.sql.any_horizon, subscriber).fetchone() is None:
        return NONE_EXPIRED
    statement = drop_expired(plan.sent_at, plan.sql.behind_horizon)
    count, sample = connection.exec_driver_sql(statement, subscriber).one()
    return ExpiredEvents(count, tuple(sample or ()))


NONE_EXPIRED = ExpiredEvents(0, ())


class _Ended(NamedTuple):
    """What a merge, or a search for refused events, came to."""

    applied: int  # events that were first
    expired: ExpiredEvents
    refused: Sequence[RejectedRow]  # events that were left out, or are to be
    locked_at: float  # when it began to lock rows


class _Raced(Exception):
    """Another transaction has recorded one of the ids."""


def _merge(
    connection: Connection,
    plan: MergePlan,
    ids: tuple[str, str | None],
    distinct: int,
    staged: str | None,
    refused: Mapping[str, RejectedRow],
    *,
    raced: bool,
    searching: bool,
) -> _Ended:
    """Record and apply what is first and not ``refused``; or, if ``searching``, find what else is to be refused."""
    sql = plan.sql
    if staged is None:
        fresh = distinct - connection.exec_driver_sql(sql.drop_processed, _range_values(plan, ids)).rowcount
    else:
        connection.exec_driver_sql(create_fresh(plan.columns))
        insert = insert_fresh(plan.columns, staged, sql.processed_in_range, plan.keep)
        fresh = connection.exec_driver_sql(insert, _range_values(plan, ids)).rowcount
    left_out: list[RejectedRow] = []
    if fresh and refused:
        dropped = connection.exec_driver_sql(drop_refused(), {"message_ids": list(refused)}).scalars()
        left_out = [refused[message_id] for message_id in sorted(dropped)]
        fresh -= len(left_out)
    expired = drop_expired_events(connection, plan) if fresh else NONE_EXPIRED
    fresh -= expired.events
    if fresh and searching:
        connection.exec_driver_sql(sql.analyze_fresh)
        found = find_refused(connection, plan.columns, lambda connection: _lock_effect(connection, plan))
        return _Ended(0, expired, found, time.monotonic())
    locked_at = time.monotonic()
    if fresh and raced:
        connection.exec_driver_sql(sql.create_recorded)
        connection.exec_driver_sql(sql.record_raced, {"subscriber_id": plan.subscriber_id})
        fresh -= connection.exec_driver_sql(sql.drop_unrecorded).rowcount
    elif fresh:
        try:
            connection.exec_driver_sql(sql.record, {"subscriber_id": plan.subscriber_id})
        except DBAPIError as error:
            if sqlstate(error) == UNIQUE_VIOLATION:
                raise _Raced from error
            raise
    if fresh:
        connection.exec_driver_sql(sql.analyze_fresh)
        _lock_effect(connection, plan)(connection)
    return _Ended(fresh, expired, left_out, locked_at)


def _lock_effect(connection: Connection, plan: MergePlan) -> Callable[[Connection], None]:
    """Wait until no other chunk of the subscriber applies its events; return what applies those in ``fresh_event``."""
    role, path, seen = _lock_effects(connection, plan)
    if not seen:
        raise ApplyFailed(
            "another relation named fresh_event comes before the events, for the search path names pg_temp late; "
            "rename it, or take pg_temp out of the search path"
        )

    def apply(connection: Connection) -> None:
        apply_effects(connection, plan.apply)
        connection.exec_driver_sql(plan.sql.restore_settings, {"role": role, "path": path})

    return apply


def _lock_effects(connection: Connection, plan: MergePlan) -> tuple[str, str, bool]:
    """Wait until no other chunk of the subscriber applies its events.

    Returns:
        Role and search path; and whether the caller's statements find the events by their name.

    Raises:
        EffectsHeld: one other chunk does, for longer than ``effects_seconds``.
    """
    sql = plan.sql
    which = {"subscriber_id": plan.subscriber_id}
    poll_seconds = min(HOLDER_POLL_SECONDS, plan.effects_seconds)
    held: tuple[int, str] | None = None
    since = time.monotonic()
    while True:
        savepoint = connection.begin_nested()
        try:
            _bound_wait(connection, f"{max(1, round(poll_seconds * 1000))}ms")
            _, role, path, seen, _ = connection.exec_driver_sql(sql.lock_effects, which).one()
            _bound_wait(connection, plan.stalled)
        except DBAPIError as error:
            if sqlstate(error) != LOCK_NOT_AVAILABLE:
                raise
            savepoint.rollback()
            holder = connection.exec_driver_sql(sql.effects_holder, which).first()
            if holder is None or (holder.pid, holder.virtualtransaction) != held:
                held = None if holder is None else (holder.pid, holder.virtualtransaction)
                since = time.monotonic() - poll_seconds
            elif (waited := time.monotonic() - since) >= plan.effects_seconds:
                state = f" ({holder.state})" if holder.state else ""
                raise EffectsHeld(
                    f"another chunk of {plan.subscriber_id} has applied its events for {waited:.0f} s, in the server "
                    f"process {holder.pid}{state}; if it is stuck, end it: "
                    f"SELECT pg_terminate_backend({holder.pid})"
                ) from None
        else:
            savepoint.commit()
            return role, path, bool(seen)


def _bound_wait(connection: Connection, lock_timeout: str) -> None:
    connection.exec_driver_sql(SERVER.bound_wait, {"lock_timeout": lock_timeout})


_log = logging.getLogger("txbox.spark")
