"""Merges a chunk, or several consecutive ones, in one transaction: records and applies the events that are first.

::

    claim the chunk ── events in place ── SAVEPOINT ─┬─ fresh_event: what is not in the inbox, one of each id, sorted
                                            ▲        ├─ plain sorted INSERT into the inbox
                                            │        ├─ the caller's statements over fresh_event
                                            │        └─ counts into the ledger ── COMMIT
                              23505, 40001, 40P01, 55P03: back to the savepoint
                              classes 22 and 23, from the effect: back to the savepoint, ``refused_events`` finds
                                                     the refused events without recording any, and all the others
                                                     are merged

Finding the processed ids first, with a join, and then inserting the rest sorted and without ON CONFLICT took a third of
the time of INSERT … ON CONFLICT … RETURNING. If a live worker records one of the ids in between, the insert fails with
23505, a unique violation; the chunk is then merged again with ON CONFLICT.

What a chunk waits for, and why nothing waits in a circle:

- Inbox rows: we and the workers insert them in sorted order, before locking any other row.
- The caller's rows: we do not know the order in which the caller's statements lock them. So chunks of one subscriber
  apply their effects one at a time, behind an advisory lock of the transaction, and cannot wait for each other.
- A live worker, or a load of another subscriber, may lock the caller's rows in another order and deadlock with a chunk.
  Postgres ends one of the two, and it runs again.

Chunks run at READ COMMITTED, whatever the role's default. At that level each statement sees what has committed before
it, so going back to the savepoint is enough, and the events need not be read again.

How long a chunk can keep others waiting, if its executor or its server process

- is frozen, or cut off, between two statements: ``stalled_seconds``; then Postgres ends its session;
- is killed while a statement runs: ten seconds; then Postgres notices that the client is gone;
- waits for a row that another transaction has locked: ``stalled_seconds``; then it releases its locks, and tries again;
- hangs in the server: ``effects_seconds``; then the chunks that wait for it give up, and name the process.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import psycopg
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from txbox import TxboxError
from txbox.backoff import Backoff
from txbox.postgres.server import SERVER
from txbox.postgres.sqlstates import LOCK_NOT_AVAILABLE, UNIQUE_VIOLATION, is_retryable, sqlstate
from txbox.postgres.transactions import driver_cursor
from txbox.status.bulk_loads import run_lock
from txbox_spark.merging.effect_runner import ApplyFailed, apply_effects
from txbox_spark.merging.fresh_event import FRESH_EVENT, create_fresh, drop_expired, drop_refused, insert_fresh
from txbox_spark.merging.merge_plan import ChunkCounts, MergePlan, TriedIds
from txbox_spark.merging.refused_events import GoodEventsFailed, find_refused, is_about_events
from txbox_spark.rejects.remarks import RejectedRow, refuse_too_many

MERGE_ATTEMPTS = 10
"""How often a chunk is tried that meets a deadlock or a serialization failure."""

MERGE_BACKOFF = Backoff(first_seconds=0.1, longest_seconds=2.0)

MOST_SEARCHES = 3
"""How often a chunk is searched for events that its effect fails for, if other transactions interfere meanwhile."""

SORT_MEMORY = "128MB"
"""The work_mem of a chunk's transaction: enough to sort a million events of usual width in memory."""

HOLDER_POLL_SECONDS = 10.0
"""How often a waiting chunk checks whether the same chunk still holds the effects lock."""


class ChunkHeld(TxboxError):
    """Another transaction has claimed the chunk and does not end. Another attempt may succeed."""


class EffectsHeld(TxboxError):
    """Another chunk of the subscriber has applied its events for longer than ``effects_seconds``."""


class Merged(NamedTuple):
    applied: int  # events that were first
    locked_at: float  # when it began to lock what others may wait for, by ``time.monotonic``
    beside_others: bool  # whether workers were recording ids when it ended


def begin_chunk(connection: Connection, plan: MergePlan, chunk: int) -> bool:
    """Begin a chunk's transaction by claiming the chunk; return False if it is already merged. Roll back then.

    Raises:
        ChunkHeld: another transaction has claimed the chunk and does not end.
    """
    settings = {"work_mem": SORT_MEMORY, "stalled": plan.stalled, "run_lock": run_lock(plan.run_id)}
    connection.exec_driver_sql(plan.sql.prepare_session, settings)
    return claim_chunk(connection, plan, chunk)


def claim_chunk(connection: Connection, plan: MergePlan, chunk: int) -> bool:
    """Claim the next chunk in a transaction that ``begin_chunk`` began; return False if it is already merged.

    The transaction must not have merged anything yet: attempts claim in ascending order before they lock anything else,
    so they do not wait in a circle.

    Raises:
        ChunkHeld: another transaction has claimed the chunk and does not end.
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
    """Record and apply the events of a chunk that are first; the caller commits.

    Several consecutive chunks can be merged as one: ``chunk`` is then the first of them.

    Args:
        connection: in the transaction that has claimed the chunk.
        plan: the run's plan.
        chunk: the chunk's number.
        ids: the chunk's first possible id, and the first one beyond it.
        counts: the counts of the chunk's rows.
        staged: the quoted table, or the query in parentheses, that has the chunk's events. None means that
            ``fresh_event`` has them, one of each id and sorted.
        tried: what the chunk's ids showed. ``fresh_event`` then has only the events of ``tried.unprocessed``, and
            ``counts`` counts only those.
        pause: waits this many seconds between two attempts.

    Raises:
        sqlalchemy.exc.DBAPIError, psycopg.Error, TxboxError: a statement or the effect failed; roll back.
    """
    if tried is None:
        parked = count_parked(connection, plan, staged or FRESH_EVENT)
    elif counts.distinct + counts.refused == len(tried.unprocessed):
        parked = tried.parked
    else:
        raise TxboxError("the source has changed since its ids were read: begin a new run")
    raced = False
    searching = False  # the effect fails for some of the events, and this attempt looks for them
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
        except (DBAPIError, psycopg.Error, ApplyFailed) as error:
            failures += 1
            again = is_retryable(error) or sqlstate(error) == LOCK_NOT_AVAILABLE
            lost = connection.invalidated
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
    beside_others = _settle(connection, plan, chunk, counts, applied, parked, expired.events)
    return Merged(applied, ended.locked_at, beside_others)


def settle_processed_chunk(
    connection: Connection, plan: MergePlan, chunk: int, ids: tuple[str, str | None], counts: ChunkCounts, limit: int
) -> TriedIds:
    """Settle a chunk if the inbox has all its ids; otherwise return up to ``limit`` it lacks. Roll back then.

    The other arguments are those of ``merge_chunk``. ``fresh_event`` has only the distinct ids.
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
    # Join on the letters, because they are few, and the events have no index.
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
) -> bool:
    """Record the counts; return whether workers are recording ids."""
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
        "tag": run_lock(plan.run_id) >> 48,
    }
    beside_others = bool(connection.exec_driver_sql(plan.sql.settle_chunk, settled).scalar_one())
    if counts.rejected and plan.most_rejected is not None:
        run = {"run_id": plan.run_id}
        rejected = connection.exec_driver_sql(plan.sql.rejected_so_far, run).scalar_one()
        refuse_too_many(rejected, plan.most_rejected, counts.remarks)
    return beside_others


def _range_values(plan: MergePlan, ids: tuple[str, str | None]) -> dict[str, str | None]:
    first, end = ids
    return {"subscriber_id": plan.subscriber_id, "first_id": first, "end_id": end}


class ExpiredEvents(NamedTuple):
    """How many events are too old to judge, and some of their ids."""

    events: int
    sample: tuple[str, ...]


def drop_expired_events(connection: Connection, plan: MergePlan) -> ExpiredEvents:
    """Delete the events that are too old to judge from ``fresh_event``, unless the plan applies them."""
    subscriber = {"subscriber_id": plan.subscriber_id}
    if plan.apply_expired or connection.exec_driver_sql(plan.sql.any_horizon, subscriber).fetchone() is None:
        return NONE_EXPIRED
    statement = drop_expired(plan.sent_at, plan.sql.behind_horizon)
    count, sample = connection.exec_driver_sql(statement, subscriber).one()
    return ExpiredEvents(count, tuple(sample or ()))


NONE_EXPIRED = ExpiredEvents(0, ())


class _Ended(NamedTuple):
    """The result of a merge, or of a search for refused events."""

    applied: int  # events that were first
    expired: ExpiredEvents
    refused: Sequence[RejectedRow]  # left out of the merge, or found by the search
    locked_at: float  # when it began to lock rows, by ``time.monotonic``


class _Raced(Exception):
    """Another transaction recorded one of the ids meanwhile."""


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
    """Record and apply the events that are first and not ``refused``; if ``searching``, find more refused ones."""
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
    if fresh:  # before anything is locked
        connection.exec_driver_sql(sql.analyze_fresh)
    if fresh and searching:
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
        _lock_effect(connection, plan)(connection)
    return _Ended(fresh, expired, left_out, locked_at)


def _lock_effect(connection: Connection, plan: MergePlan) -> Callable[[Connection], None]:
    """Wait until no other chunk of the subscriber applies its events; return a function that applies ours."""
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
        The role, the search path, and whether the caller's statements find ``fresh_event`` by its name.

    Raises:
        EffectsHeld: the same other chunk applied its events for longer than ``effects_seconds``.
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
