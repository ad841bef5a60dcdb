"""Send the messages of some lanes in one transaction that claims them, sends, and settles.

::

    BEGIN ─┐
      claim│    try-lock each lane, for this transaction; another relay that tries it leaves it out
      read ┘    what is in the lanes, in a separate statement: the locks are older than its snapshot, so what the
                last owner of a lane has settled is seen as settled
                ···· here the messages go to the broker; the transaction holds no snapshot and has no number ····
      settle ┐  delete what was sent, postpone what was refused
    COMMIT ──┘  and the lanes are free

Each bracket is one round trip, for a batch of new messages that are all sent. If keys are held or messages refused,
their statements come one by one in between.

Whatever ends the transaction before its commit (a crash, a lost connection, a failover) leaves the messages as they
were. The next relay sends them again under the same ids. If a relay does not run (stopped, swapped out, cut off), the
server ends its transaction after a time; when it wakes, it checks its claim before it sends on.
"""

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from psycopg import IsolationLevel
from sqlalchemy import Connection, Engine

from txbox.backoff import Backoff
from txbox.dead_letters import DeadLetter, DeadLetters, Reason
from txbox.dead_letters.failures import MAX_ERROR_CHARACTERS
from txbox.errors import BrokerError
from txbox.outbox.outbox import RELAY_SUBSCRIBER
from txbox.postgres.guards.commit_guard import begin_with, commit
from txbox.postgres.round_trip import Statement, Step, rows_of, run_steps
from txbox.postgres.sql import moment
from txbox.postgres.sql_files import SqlFile
from txbox.postgres.transactions import driver_cursor, short_transaction
from txbox.relay.dispatcher import Dispatcher, DispatchResult
from txbox.relay.pending import Claim
from txbox.relay.publisher import OutboxMessage, Refused
from txbox.relay.settlement import BatchSettlement, FailedKey, Row, settle
from txbox.text import storable

TIMED_SINCE = (17,)
"""The PostgreSQL version that introduced transaction_timeout."""


class RelayStatements(SqlFile, file="relay.sql"):
    """The statements of ``relay.sql``, including those of the poller and the reporter."""

    missing_rights: str
    default_isolation: str
    keep_idle_session: str
    find_new: str
    set_plan: str
    find_burst: str
    find_all: str
    wake_due: str
    repair_held_keys: str
    claim: str
    claim_timed: str
    lock_lanes: str
    unlock_lanes: str
    which_server: str
    claim_stands: str
    drop_snapshot: str
    begin_reading: str
    end_reading: str
    read_fresh: str
    held_keys: str
    due_keys: str
    read_due: str
    wait_for_disk: str
    delete_messages: str
    take_messages: str
    keep_messages: str
    postpone_messages: str
    hold_messages: str
    release_keys: str
    paused_destinations: str
    report: str
    take_turn: str
    delete_row: str


@dataclass(slots=True)
class ClaimResult:
    settlement: BatchSettlement = field(default_factory=BatchSettlement)  # what became of the messages
    fresh: dict[int, int] = field(default_factory=dict)  # lanes with more to send, each with the position to go on from
    due: set[int] = field(default_factory=set)  # lanes with held keys to try again at once
    locked: frozenset[int] = frozenset()  # lanes of the claim that another relay works on
    outage: BrokerError | None = None  # why the broker cannot be reached; None if it can
    destination: str | None = None  # where the messages went; None if there were none
    slowest_seconds: float = 0.0  # duration of a publisher's slowest call
    is_async: bool | None = None  # whether an async sender has its destination; None: unknown


class Sender:
    """Sends the messages of claims. Thread-safe."""

    def __init__(
        self,
        engine: Engine,
        statements: RelayStatements,
        dispatcher: Dispatcher,
        *,
        letters: DeadLetters,
        batch_size: int,
        batch_bytes: int,
        max_attempts: int | None,
        backoff: Backoff,
        keep_sent: bool,
        publish_timeout_seconds: float,
    ) -> None:
        """Store the arguments of ``Relay``."""
        self._engine = engine
        self._statements = statements
        self._dispatcher = dispatcher
        self._letters = letters
        self._batch_size = batch_size
        self._batch_bytes = batch_bytes
        self._max_attempts = max_attempts
        self._backoff = backoff
        self._keep_sent = keep_sent
        self._publish_timeout_seconds = publish_timeout_seconds

    def send(self, claim: Claim) -> ClaimResult:
        """Send the messages of these lanes, up to one batch.

        Raises any error of the driver if the database fails; then nothing has changed.
        """
        result = ClaimResult()
        sets_level = len(self._engine.dispatch.begin) > 0  # a host's listener may send something before our BEGIN
        with short_transaction(self._engine, sets_level=sets_level) as connection, driver_cursor(connection) as cursor:
            rows, held = self.read(connection, cursor, claim, result, steps=[self.claim_step(connection, claim.lanes)])
            if rows and self._dispatcher.is_async(rows):
                result.fresh, result.due, result.is_async = dict(claim.fresh), set(claim.due), True
            elif rows:
                result.is_async = False
                dispatched = self._dispatcher.dispatch(
                    self.sendable(rows, held),
                    check_claim=lambda: cursor.execute(self._statements.claim_stands),
                )
                self.conclude(rows, held, dispatched, result)
                self.settle(connection, cursor, result)
        return result

    def read(
        self,
        connection: Connection,
        cursor: Any,
        claim: Claim,
        result: ClaimResult,
        *,
        steps: Sequence[Step],
        limit: int | None = None,
        end: str | None = None,
        same: set[str] | None = None,
    ) -> tuple[list[Row], set[FailedKey]]:
        """Claim lanes and read their messages; return the messages, and those of their keys that are held.

        Args:
            connection: in a transaction, or about to begin one.
            cursor: of the driver.
            claim: the lanes.
            result: gets the lanes that another relay has, and those that have more messages.
            steps: run first; the last of them claims the lanes.
            limit: most messages; None: those of one batch.
            end: the statement after the reading; None: ``drop_snapshot``.
            same: identities that this session's one server has had before; gets its current one.
        """
        sql, limit = self._statements, self._batch_size if limit is None else limit
        last = Step(Statement.of(end or sql.drop_snapshot, has_plan=False))
        claimed, answer = self._claim(connection, claim, steps, limit, last, same)
        result.locked = claim.lanes - claimed
        result.fresh = {lane: position for lane, position in claim.fresh.items() if lane in result.locked}
        result.due = set(claim.due & result.locked)
        if not claimed:
            if claim.due:
                run_steps(connection, [last])
            return [], set()
        due, held = self._read_due(cursor, claim.due & claimed, limit, result)
        wanted = {lane: position for lane, position in claim.fresh.items() if lane in claimed}
        each = limit // max(len(claim.fresh), 1)
        if claim.due:
            each = (limit - len(due)) // max(len(wanted), 1)
            reading = self._read_steps(wanted, each, last)
            answer = run_steps(connection, reading)[0] if reading else None
        fresh, any_held = self._read_fresh(connection, answer, wanted, each, result)
        if any_held and (keys := {key for row in fresh if (key := row.ordered) is not None}):
            cursor.execute(sql.held_keys, _keys(keys))
            held |= {FailedKey(*row) for row in cursor.fetchall()}
        if claim.due or any_held:
            # The server keeps an answer's snapshot until the next statement, for a cursor that is not used. A broker
            # that hangs must not hold back vacuum.
            run_steps(connection, [last])
        return due + fresh, held

    def claim_step(self, connection: Connection, lanes: Iterable[int] = ()) -> Step:
        """Return the step that begins a relay's transaction, and claims lanes until it ends."""
        timed = (connection.dialect.server_version_info or ()) >= TIMED_SINCE
        statement = Statement.of(self._statements.claim_timed if timed else self._statements.claim)
        idle_timeout = str(round(self._publish_timeout_seconds * 1000))
        return statement.with_values(idle_timeout_milliseconds=idle_timeout, lanes=array(sorted(lanes)))

    @staticmethod
    def claimed(connection: Connection, answer: Any) -> tuple[str, list[int]]:
        """Return which run of which server answered a claiming step, and the lanes that the step claimed.

        Raises ``BrokerError`` if the server is read-only.
        """
        *_, server, read_only, lanes = rows_of(connection, answer)[0]
        if read_only:
            # What is sent could not be settled. Another connection may lead to another server.
            connection.invalidate()
            raise BrokerError("the database is read-only: what is sent could not be settled, so nothing is sent")
        return server, list(lanes)

    def _claim(
        self,
        connection: Connection,
        claim: Claim,
        steps: Sequence[Step],
        limit: int,
        last: Step,
        same: set[str] | None,
    ) -> tuple[set[int], Any]:
        """Claim lanes, and read new messages unless held ones come first; return the lanes and the answer."""
        read = [] if claim.due else self._read_steps(claim.fresh, limit // len(claim.fresh), last)
        answers = begin_with(connection, *steps, *read, level=IsolationLevel.READ_COMMITTED)
        server, lanes = self.claimed(connection, answers[len(steps) - 1])
        check_server(claim.server, {server, *(same or ())})
        if same is not None:
            same.add(server)
        return set(lanes), answers[len(steps)] if read else None

    def _read_due(
        self, cursor: Any, lanes: Set[int], limit: int, result: ClaimResult
    ) -> tuple[list[Row], set[FailedKey]]:
        """Read messages of held keys that are due; return the messages and the keys."""
        if not lanes:
            return [], set()
        cursor.execute(self._statements.due_keys, {"lanes": sorted(lanes), "limit": limit})
        keys = {FailedKey(*row) for row in cursor.fetchall()}
        if not keys:
            return [], set()
        if len(keys) >= limit:
            result.due |= lanes  # there may be more
        each = max(limit // len(keys), 1)
        limits = {"each_limit": each, "bytes_limit": self._batch_bytes}
        cursor.execute(self._statements.read_due, {**_keys(keys), **limits})
        return [_row(found) for found in cursor.fetchall()], keys

    def _read_steps(self, wanted: Mapping[int, int], each: int, last: Step) -> list[Step]:
        """Return the steps that read up to ``each`` new messages of each lane and drop the snapshot; or nothing."""
        if not wanted or each < 1:
            return []
        read = Statement.of(self._statements.read_fresh).with_values(
            lanes=array(wanted),
            positions=array(wanted.values()),
            each_limit=str(each),
            bytes_limit=str(self._batch_bytes),
        )
        return [read, last]

    def _read_fresh(
        self, connection: Connection, answer: Any, wanted: Mapping[int, int], each: int, result: ClaimResult
    ) -> tuple[list[Row], bool]:
        """Return new messages, and whether any key of their lanes is held; none if they were not asked for."""
        if answer is None:
            result.fresh |= wanted
            return [], False
        found = rows_of(connection, answer)
        if not found:
            return [], False
        read = [_row(row) for row in found]
        *_, bytes_before, any_held = found[-1]
        # The byte limit may have cut it off: at worst, the lanes are read once more and nothing is found.
        cut = bytes_before + len(read[-1].message.body) >= self._batch_bytes
        last: dict[int, list[int]] = {}
        for row in read:
            last.setdefault(row.lane, []).append(row.position)
        for lane, position in wanted.items():
            positions = last.get(lane, [])
            if cut or len(positions) == each:
                result.fresh[lane] = positions[-1] + 1 if positions else position
        return read, any_held

    @staticmethod
    def sendable(rows: Iterable[Row], held: Set[FailedKey]) -> list[Row]:
        """Return the messages whose key is not waiting for another message."""
        return [row for row in rows if row.held or row.ordered not in held]

    def conclude(
        self, rows: Sequence[Row], held: Set[FailedKey], dispatched: DispatchResult, result: ClaimResult
    ) -> None:
        """Store in a claim's result what became of its messages, of which there is at least one."""
        result.destination = rows[0].message.destination
        result.outage, result.slowest_seconds = dispatched.outage, dispatched.slowest_seconds
        result.settlement = settle(
            rows, dispatched.sent, dispatched.refused, held=held, max_attempts=self._max_attempts
        )
        self.leave(result.settlement.left, result)

    @staticmethod
    def leave(rows: Iterable[Row], result: ClaimResult) -> None:
        """Record in a claim's result that these messages are still to be sent."""
        for row in rows:
            if row.held:
                result.due.add(row.lane)
            else:
                result.fresh[row.lane] = min(row.position, result.fresh.get(row.lane, row.position))

    def settle(self, connection: Connection, cursor: Any, result: ClaimResult) -> None:
        """Settle messages, and commit or leave that to the caller; ``result`` gets lanes that are due."""
        sql, settlement = self._statements, result.settlement
        if settlement.sent:
            settled = sql.keep_messages if self._keep_sent else sql.delete_messages
            others = settlement.dead or settlement.again or settlement.behind or settlement.moved
            # Commit listeners of the host's may still add something.
            if not others and not len(self._engine.dispatch.commit):
                commit(connection, Statement.of(settled).with_values(**_places(settlement.sent)), guarded=False)
                return  # SQLAlchemy's commit finds nothing left to do
            cursor.execute(settled, _places(settlement.sent))
        if settlement.dead or settlement.again or settlement.behind:
            # Write to disk that a message is gone, or held ahead of its key, before the rest of that key is sent.
            cursor.execute(sql.wait_for_disk)
        if settlement.dead:
            cursor.execute(sql.take_messages, _places([row for row, _ in settlement.dead]))
            taken = set(cursor.fetchall())
            for row, refusal in settlement.dead:
                if (row.lane, row.position) in taken:
                    self._letters.park_in(connection, _letter(row, refusal))
        if settlement.again:
            parameters = {
                **_places([row for row, _ in settlement.again]),
                "errors": [storable(refusal.error)[:MAX_ERROR_CHARACTERS] for _, refusal in settlement.again],
                "pauses": [self._pause(row) for row, _ in settlement.again],
                "attempts": [row.message.attempts + refusal.counted for row, refusal in settlement.again],
            }
            cursor.execute(sql.postpone_messages, parameters)
        if settlement.behind:
            cursor.execute(sql.hold_messages, _places(settlement.behind))
        if settlement.moved:
            cursor.execute(sql.release_keys, _keys(settlement.moved))
            result.due.update(row[0] for row in cursor.fetchall())

    def _pause(self, row: Row) -> timedelta:
        return timedelta(seconds=self._backoff.seconds(row.message.attempts + 1))


def check_server(expected: str, same: Set[str]) -> None:
    """Raise ``BrokerError`` unless ``expected`` is among these identities, all of one server.

    A pool may have replaced a lost connection unnoticed.
    """
    if expected not in same:
        raise BrokerError("the database server was restarted or replaced; the relay reads the whole outbox again")


def _row(found: Any) -> Row:
    lane, position, held, message_id, destination, body, key, headers, attempts, published_at, age, *_ = found
    named, flaw = _headers(headers)
    message = OutboxMessage(message_id, destination, body, key, named, attempts, moment(published_at))
    return Row(lane, position, held, message, age, flaw)


def _headers(text: str) -> tuple[Mapping[str, str], str | None]:
    """Return headers, or none and what is wrong with them: a row that ``publish`` did not write may hold anything."""
    if text == "{}":
        return {}, None
    try:
        named = json.loads(text)
    except ValueError:  # a number of thousands of digits
        named = None
    if isinstance(named, dict) and all(isinstance(value, str) for value in named.values()):
        return named, None
    return {}, "takes headers that are text by name, and no others"


def _keys(keys: Set[FailedKey]) -> dict[str, Any]:
    lanes, destinations, names = map(list, zip(*sorted(keys), strict=True))
    return {"lanes": lanes, "destinations": destinations, "keys": names}


def _places(rows: Sequence[Row]) -> dict[str, str]:
    return {"lanes": array([row.lane for row in rows]), "positions": array([row.position for row in rows])}


def array(numbers: Iterable[int]) -> str:
    """Return numbers in the text form of a Postgres array."""
    return f"{{{','.join(map(str, numbers))}}}"


def _letter(row: Row, refusal: Refused) -> DeadLetter:
    message = row.message
    return DeadLetter(
        # A message may be sent to several destinations under one id, with one letter for each.
        subscriber_id=f"{RELAY_SUBSCRIBER}:{message.destination}",
        message_id=message.id,
        reason=Reason.FAILED,
        error=refusal.error,
        attempts=message.attempts + 1,
        source=message.destination,
        body=message.body,
        headers=message.headers,
        envelope={"outbox": {"key": message.key}},
    )
