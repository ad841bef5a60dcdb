"""The settler: commits the results of deliveries, and retries while their claims hold.

A message that was sent but not settled is sent again, so the settler does not give up at the first failure. Either the
database refuses one settlement (a trigger, a lock, a deadlock): then only that one waits. Or nothing can be settled (no
connection, a read-only server, a missing right): then all wait, and the sender claims nothing, because it would send
every message again and again. The settler assumes the second if an empty transaction fails, or if the settlements of
several destinations are refused in succession.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from sqlalchemy import Connection, Engine

from txbox.postgres.engines import discard_if_session_broken
from txbox.postgres.guards.commit_guard import begin_with
from txbox.postgres.round_trip import Statement, Step, run_steps
from txbox.postgres.server import SERVER
from txbox.postgres.transactions import driver_cursor
from txbox.relay.claim_session import SendingClaim
from txbox.relay.scheduler import OUTAGE_BACKOFF
from txbox.relay.sender import ClaimResult, Sender, check_server
from txbox.relay.settlement import BatchSettlement

LOCK_SECONDS = 1.0
"""The longest that a settlement waits for a locked row; all others wait behind it."""

IDLE_SECONDS = 1.0
"""Idle time after which the settler checks that its connection still works."""

MOST_REFUSED = 3
"""Destinations refused in succession before the settler assumes that every settlement is refused."""


class SettledClaims(NamedTuple):
    done: Sequence[SendingClaim]
    given_up: Sequence[SendingClaim]  # they could not be settled in time


class ClaimSettler:
    """Settles deliveries in its own transactions on one connection. Not thread-safe."""

    def __init__(
        self,
        engine: Engine,
        sender: Sender,
        *,
        hold_seconds: float,
        check_claims: Callable[[], object],
        on_failure: Callable[[BaseException, float], None],
    ) -> None:
        """Store the collaborators.

        ``hold_seconds``: how long a delivery that cannot be settled is kept. ``check_claims`` raises if the claims may
        be lost. ``on_failure`` gets a database error and the seconds until the next try.
        """
        self._engine = engine
        self._sender = sender
        self._hold_seconds = hold_seconds
        # Well before the server ends the sessions of the claims, which are not checked during the wait.
        milliseconds = round(min(LOCK_SECONDS, hold_seconds / 4) * 1000)
        self._bound = Statement.of(SERVER.bound_wait).with_values(lock_timeout=f"{milliseconds}ms")
        self._check_claims = check_claims
        self._on_failure = on_failure
        self._waiting: list[SendingClaim] = []
        self._outages = 0  # tries since a transaction last committed
        self._refused: set[str] = set()  # destinations refused since one was settled
        self._try_at = -math.inf
        self._hurries = False
        self._connection: Connection | None = None
        self._used_at = 0.0

    def open(self) -> None:
        """Take a connection and keep it, so that sent messages can be settled even if the pool has no other to give."""
        if self._connection is not None and self._is_lost(self._connection):
            self.close()
        if self._connection is None:
            self._connection = self._engine.connect().execution_options(isolation_level="READ COMMITTED")
            self._used_at = time.monotonic()

    def _is_lost(self, connection: Connection) -> bool:
        """Return whether a connection has ended: a server or network may end one that was idle for a while."""
        if not connection.invalidated and time.monotonic() - self._used_at > IDLE_SECONDS:
            try:
                # A rollback may have discarded prepared statements (DEALLOCATE ALL), which is not a lost connection.
                run_steps(connection, [Step(Statement.of(SERVER.backend_pid, has_plan=False))])
            except Exception:  # noqa: BLE001 - the next connection shows what else is wrong, if anything
                connection.invalidate()
        return connection.invalidated

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def hurry(self) -> None:
        """Retry at once, and then often: a stop has begun, and its time is short."""
        if not self._hurries:
            self._hurries = True
            self._try_at = -math.inf
            for delivery in self._waiting:
                delivery.settle_at = -math.inf

    @property
    def works(self) -> bool:
        """Whether settling works, as far as is known."""
        return self._outages == 0 and len(self._refused) < MOST_REFUSED

    @property
    def answers(self) -> bool:
        """Whether a transaction can be committed, as far as is known, even if only an empty one."""
        return self._outages == 0

    @property
    def next_try(self) -> float:
        """When to retry, by ``time.monotonic``; infinity if there is nothing to retry."""
        if self._outages:
            return self._try_at
        return min((delivery.settle_at for delivery in self._waiting), default=math.inf)

    def settle(self, ended: Sequence[SendingClaim], *, last_try: bool) -> SettledClaims:
        """Settle what has ended and what could not be settled before; after ``last_try``, nothing is retried.

        Raises what ``check_claims`` raises.
        """
        now = time.monotonic()
        for delivery in ended:
            self._sender.conclude(delivery.rows, delivery.held, delivery.dispatched, delivery.result)
            delivery.settle_until = now + self._hold_seconds
        done = [delivery for delivery in ended if not delivery.result.settlement.changes]
        self._waiting = [delivery for delivery in self._waiting if not delivery.lost]
        self._waiting += [delivery for delivery in ended if delivery.result.settlement.changes]
        if last_try or now >= self._try_at:
            due = [delivery for delivery in self._waiting if last_try or delivery.settle_at <= now]
            if due or self._outages:
                done += self._committed(due)
        settled, now = set(done), time.monotonic()
        left = [delivery for delivery in self._waiting if delivery not in settled]
        given_up = [delivery for delivery in left if last_try or delivery.settle_until <= now]
        self._waiting = [] if last_try else [delivery for delivery in left if delivery.settle_until > now]
        return SettledClaims(done, given_up)

    def _committed(self, deliveries: Sequence[SendingClaim]) -> Sequence[SendingClaim]:
        """Commit settlements, together or else one by one; return those that are committed."""
        try:
            self._commit(deliveries)
        except Exception as error:  # noqa: BLE001 - it comes from the driver or a listener of the host's
            self._outages += 1
            pause = self._pause(self._outages)
            self._try_at = time.monotonic() + pause
            self._check_claims()  # the claims may be lost, not the settlement at fault
            if not deliveries or not self._can_settle():
                self._on_failure(error, pause)
                return []
            self._works_again()
            if len(deliveries) > 1:
                return self._committed_singly(deliveries)
            for delivery in deliveries:
                self._refused.add(delivery.rows[0].message.destination)
                delivery.failures += 1
                pause = self._pause(delivery.failures)
                delivery.settle_at = time.monotonic() + pause
                self._on_failure(error, pause)
            return []
        self._works_again()
        if deliveries:
            self._refused.clear()
        return deliveries

    def _committed_singly(self, deliveries: Sequence[SendingClaim]) -> Sequence[SendingClaim]:
        """Commit settlements one by one. Once all seem to be refused, try just one more to see whether that goes on."""
        done: list[SendingClaim] = []
        for number, delivery in enumerate(deliveries):
            if self._outages:
                break
            if number and not self.works:
                delivery.settle_at = time.monotonic() + OUTAGE_BACKOFF.seconds(1)
            else:
                done += self._committed([delivery])
        return done

    def _pause(self, failures: int) -> float:
        return OUTAGE_BACKOFF.seconds(1 if self._hurries else failures)

    def _can_settle(self) -> bool:
        try:
            self._commit(())
        except Exception:  # noqa: BLE001 - as above, and the first error says more
            return False
        return True

    def _works_again(self) -> None:
        self._outages, self._try_at = 0, -math.inf

    def _commit(self, deliveries: Sequence[SendingClaim]) -> None:
        """Settle deliveries in one transaction; without any, test whether one can commit."""
        self.open()  # before the claims are checked, because it may take long
        every = ClaimResult(settlement=BatchSettlement.merged(delivery.result.settlement for delivery in deliveries))
        if every.settlement.again or every.settlement.behind or every.settlement.dead:
            # If another relay has sent a refused message meanwhile, what is held behind it would wait for a repair.
            self._check_claims()
        with self._transaction() as connection, driver_cursor(connection) as cursor:
            _, answer = begin_with(connection, self._bound, self._sender.claim_step(connection))
            server, _ = self._sender.claimed(connection, answer)
            if any(server not in delivery.session.servers for delivery in deliveries):
                self._check_claims()  # finds out what the servers of the claims are by now
            for delivery in deliveries:
                # A slow one may belong to an earlier server.
                same = delivery.session.servers
                check_server(delivery.claim.server, {server} | (same if server in same else set()))
            self._sender.settle(connection, cursor, every)
        for delivery in deliveries:
            delivery.result.due |= every.due & delivery.claim.lanes

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        """Like ``short_transaction``, on the open connection."""
        assert self._connection is not None  # noqa: S101 - for the type checker
        try:
            with self._connection.begin():
                yield self._connection
            self._used_at = time.monotonic()
        except Exception as error:
            discard_if_session_broken(self._connection, error)
            raise
