"""A session that claims the lanes of many destinations, lets go of each by itself, and what it has in delivery."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sqlalchemy import Engine

from txbox.errors import BrokerError
from txbox.postgres.guards.commit_guard import commit
from txbox.postgres.round_trip import Statement, Step, rows_of, run_steps
from txbox.postgres.transactions import driver_cursor
from txbox.relay.dispatcher import DispatchResult
from txbox.relay.pending import Claim
from txbox.relay.sender import ClaimResult, RelayStatements, Sender, array
from txbox.relay.settlement import FailedKey, Row


class ClaimSession:
    """Claims lanes and reads them, in one transaction that writes nothing. Not thread-safe.

    A sender's transaction ends with its one destination. That of hundreds would end with the slowest of them; so the
    locks are those of the session, which can be released one by one, and what was sent is settled by another
    transaction, before its lane is released. The transaction keeps a pooler from giving the session to others, and what
    it reads from being locked for longer than it reads.

    If the session ends, however it ends, its locks are gone, and other relays send what it had. What is settled after
    that does no harm: what was sent is deleted, once; a key that is held is held once more. No message of a key is sent
    before the one before it is gone from the table, or held.
    """

    def __init__(self, engine: Engine, statements: RelayStatements, sender: Sender) -> None:
        """Connect, and claim nothing yet."""
        self._statements = statements
        self._sender = sender
        self._connection = engine.connect().execution_options(isolation_level="READ COMMITTED")
        self._connection.begin()
        self._begun = False
        self.began = self.checked_at = time.monotonic()
        self.lanes: set[int] = set()
        # What its server was found to be. It is one server, as a session ends with its server's run; but when the
        # server's statistics are reset, it looks like another one.
        self.servers: set[str] = set()

    def read(self, claim: Claim, result: ClaimResult, *, limit: int) -> tuple[list[Row], set[FailedKey]]:
        """Claim the lanes of many destinations, and read them; see ``Sender.read``."""
        connection, sql, began = self._connection, self._statements, time.monotonic()
        steps = [Statement.of(sql.lock_lanes).with_values(lanes=array(sorted(claim.lanes)))]
        if not self._begun:
            steps[:0] = [self._sender.claim_step(connection), Step(Statement.of(sql.begin_reading, has_plan=False))]
        with driver_cursor(connection) as cursor:
            rows, held = self._sender.read(
                connection, cursor, claim, result, steps=steps, limit=limit, end=sql.end_reading, same=self.servers
            )
        self._begun, self.checked_at = True, began
        self.lanes |= claim.lanes - result.locked
        return rows, held

    def release(self, lanes: Iterable[int]) -> None:
        """Let go of lanes, of those that are claimed. Raises ``BrokerError`` if they were lost."""
        if not (ours := self.lanes.intersection(lanes)):
            return
        began = time.monotonic()
        step = Statement.of(self._statements.unlock_lanes).with_values(lanes=array(sorted(ours)))
        answer, _ = run_steps(self._connection, [step, self._drop_snapshot()])
        if rows_of(self._connection, answer)[0][0]:
            raise BrokerError("the session that had claimed lanes was replaced: other relays may send what they hold")
        self.lanes -= ours
        self.checked_at = began

    def check(self) -> None:
        """Raise an error of the driver if the session has ended: then its claims are lost."""
        began = time.monotonic()
        answer, _ = run_steps(
            self._connection, [Step(Statement.of(self._statements.which_server)), self._drop_snapshot()]
        )
        self.servers.add(rows_of(self._connection, answer)[0][1])
        self.checked_at = began

    def end(self) -> None:
        """Give the connection back; nothing is claimed any more."""
        if self._begun:
            commit(self._connection, guarded=False)
        self._connection.close()

    def abandon(self) -> None:
        """Close the connection, with its claims, in its transaction: a pooler, too, then ends the session."""
        self._connection.invalidate()
        self._connection.close()

    def _drop_snapshot(self) -> Step:
        # A session that waits for hundreds of destinations must not hold vacuum back.
        return Step(Statement.of(self._statements.drop_snapshot, has_plan=False))


@dataclass(slots=True, eq=False)
class SendingClaim:
    """A claim whose messages are being sent."""

    claim: Claim
    session: ClaimSession
    rows: Sequence[Row]
    held: set[FailedKey]
    result: ClaimResult
    size: int  # bytes of the bodies
    dispatched: DispatchResult = field(default_factory=DispatchResult)
    lost: bool = False  # others may send it: nothing more is sent, and nothing of it is settled
    settle_until: float = 0.0  # by ``time.monotonic``; then it is let go of, and sent again
    settle_at: float = 0.0  # not before, as it could not be settled
    failures: int = 0  # how often it could not be settled, though others could be
