"""A session that claims the lanes of many destinations and releases each by itself, and the claims it is sending."""

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
    """Claims lanes and reads them in one transaction that writes nothing. Not thread-safe.

    A sender's transaction ends with its one destination. A transaction for hundreds would end with the slowest. So this
    session takes session locks, which it can release one by one. Another transaction settles what was sent before its
    lane is released. The open transaction keeps a pooler from giving the session to others. It keeps locks on the
    tables it reads for no longer than the read.

    However the session ends, its locks go with it and other relays send what it had claimed. Settling after that does
    no harm: a sent message is deleted once, a held key is held once more. No message of a key is sent before the one
    ahead of it is gone from the table, or held.
    """

    def __init__(self, engine: Engine, statements: RelayStatements, sender: Sender) -> None:
        """Connect, without claiming anything yet."""
        self._statements = statements
        self._sender = sender
        self._connection = engine.connect().execution_options(isolation_level="READ COMMITTED")
        self._connection.begin()
        self._begun = False
        self.began = self.checked_at = time.monotonic()
        self.lanes: set[int] = set()
        # The identities its server has had. It is one server, since a session ends with its server's run; but a reset
        # of the server's statistics makes it look like another.
        self.servers: set[str] = set()

    def read(self, claim: Claim, result: ClaimResult, *, limit: int) -> tuple[list[Row], set[FailedKey]]:
        """Claim the lanes of many destinations and read them; see ``Sender.read``."""
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
        """Release those of the lanes that are claimed. Raise ``BrokerError`` if they were lost."""
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
        """Raise an error of the driver if the session has ended, and its claims with it."""
        began = time.monotonic()
        answer, _ = run_steps(
            self._connection, [Step(Statement.of(self._statements.which_server)), self._drop_snapshot()]
        )
        self.servers.add(rows_of(self._connection, answer)[0][1])
        self.checked_at = began

    def end(self) -> None:
        """Commit and return the connection to the pool. Call this only when nothing is claimed."""
        if self._begun:
            commit(self._connection, guarded=False)
        self._connection.close()

    def abandon(self) -> None:
        """Close the connection inside its transaction, so that a pooler ends the session and its claims too."""
        self._connection.invalidate()
        self._connection.close()

    def _drop_snapshot(self) -> Step:
        # A session that waits for hundreds of destinations must not hold back vacuum.
        return Step(Statement.of(self._statements.drop_snapshot, has_plan=False))


@dataclass(slots=True, eq=False)
class SendingClaim:
    claim: Claim
    session: ClaimSession
    rows: Sequence[Row]
    held: set[FailedKey]
    result: ClaimResult
    size: int  # bytes of the message bodies
    dispatched: DispatchResult = field(default_factory=DispatchResult)
    lost: bool = False  # other relays may send it: send and settle nothing more
    settle_until: float = 0.0  # by ``time.monotonic``; after that it is released and sent again
    settle_at: float = 0.0  # by ``time.monotonic``; not before, because settling failed
    failures: int = 0  # how often it could not be settled although others could
