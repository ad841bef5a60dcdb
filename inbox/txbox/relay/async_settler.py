"""The settler: commits what has come of deliveries, and tries again while their claims stand.

What was sent and could not be settled would be sent again, so it is not let go of at the first failure. Either the
database refuses this one settlement (a trigger, a lock, a deadlock): then it alone waits. Or nothing can be settled (no
connection, a server that is read-only, a right that is missing): then all wait, and the sender claims nothing, for it
would send that as often. That is so when an empty transaction fails, or one destination after the other is refused.
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
"""How long a settlement waits for a row that another session has locked, at most; all others wait behind it."""

IDLE_SECONDS = 1.0
"""After which it is asked whether the connection for settlements is there still."""

MOST_REFUSED = 3
"""Destinations whose settlements are refused, one after the other, before it is taken for a refusal of all."""


class SettledClaims(NamedTuple):
    """What has become of deliveries."""

    done: Sequence[SendingClaim]
    given_up: Sequence[SendingClaim]  # they could not be settled for too long


class ClaimSettler:
    """Settles deliveries, by transactions of its own on one connection. Not thread-safe."""

    def __init__(
        self,
        engine: Engine,
        sender: Sender,
        *,
        hold_seconds: float,
        check_claims: Callable[[], object],
        on_failure: Callable[[BaseException, float], None],
    ) -> None:
        """Take what it works with.

        ``hold_seconds``: how long a delivery that cannot be settled is held. ``check_claims`` raises if the claims may
        be lost. ``on_failure`` gets an error of the database, and after how many seconds it is tried again.
        """
        self._engine = engine
        self._sender = sender
        self._hold_seconds = hold_seconds
        # Well before the server ends the sessions of the claims, which are not checked meanwhile.
        milliseconds = round(min(LOCK_SECONDS, hold_seconds / 4) * 1000)
        self._bound = Statement.of(SERVER.bound_wait).with_values(lock_timeout=f"{milliseconds}ms")
        self._check_claims = check_claims
        self._on_failure = on_failure
        self._waiting: list[SendingClaim] = []
        self._outages = 0  # tries since a transaction could be committed
        self._refused: set[str] = set()  # destinations that were refused since one was settled
        self._try_at = -math.inf
        self._hurries = False
        self._connection: Connection | None = None
        self._used_at = 0.0

    def open(self) -> None:
        """Take a connection, and keep it, so that what is sent can be settled though a pool has no other to give."""
        if self._connection is not None and self._is_lost(self._connection):
            self.close()
        if self._connection is None:
            self._connection = self._engine.connect().execution_options(isolation_level="READ COMMITTED")
            self._used_at = time.monotonic()

    def _is_lost(self, connection: Connection) -> bool:
        """Return whether a connection has ended: a server or a network may end one that was idle for a while."""
        if not connection.invalidated and time.monotonic() - self._used_at > IDLE_SECONDS:
            try:
                # What a rollback has discarded (DEALLOCATE ALL) is not to look like a lost connection.
                run_steps(connection, [Step(Statement.of(SERVER.backend_pid, has_plan=False))])
            except Exception:  # noqa: BLE001 - another one says what is wrong, if that is not all
                connection.invalidate()
        return connection.invalidated

    def close(self) -> None:
        """Give the connection back."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def hurry(self) -> None:
        """Try again at once, and then often: a stop has begun, whose time is short."""
        if not self._hurries:
            self._hurries = True
            self._try_at = -math.inf
            for delivery in self._waiting:
                delivery.settle_at = -math.inf

    @property
    def works(self) -> bool:
        """Whether something could be settled, as far as is known."""
        return self._outages == 0 and len(self._refused) < MOST_REFUSED

    @property
    def answers(self) -> bool:
        """Whether a transaction could be committed, as far as is known, be it without a settlement."""
        return self._outages == 0

    @property
    def next_try(self) -> float:
        """When something is to be tried again, by ``time.monotonic``; infinity: nothing is."""
        if self._outages:
            return self._try_at
        return min((delivery.settle_at for delivery in self._waiting), default=math.inf)

    def settle(self, ended: Sequence[SendingClaim], *, last_try: bool) -> SettledClaims:
        """Settle what has ended, and what could not be settled before; ``last_try``: nothing is tried again.

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
        except Exception as error:  # noqa: BLE001 - it is the driver's, or of a listener of the host's
            self._outages += 1
            pause = self._pause(self._outages)
            self._try_at = time.monotonic() + pause
            self._check_claims()  # it may not be the settlement's fault
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
        """Commit settlements one by one; once it looks as if all were refused, one more shows whether that goes on."""
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
        """Settle deliveries in one transaction; without any, see whether that could be done."""
        self.open()  # before the claims are checked: it may take long
        every = ClaimResult(settlement=BatchSettlement.merged(delivery.result.settlement for delivery in deliveries))
        if every.settlement.again or every.settlement.behind or every.settlement.dead:
            # If another relay has sent a refused message meanwhile, what is held behind it would wait for a repair.
            self._check_claims()
        with self._transaction() as connection, driver_cursor(connection) as cursor:
            _, answer = begin_with(connection, self._bound, self._sender.claim_step(connection))
            server, _ = self._sender.claimed(connection, answer)
            if any(server not in delivery.session.servers for delivery in deliveries):
                self._check_claims()  # finds what the servers of the claims are by now
            for delivery in deliveries:
                # One that has taken long may be of an earlier server.
                same = delivery.session.servers
                check_server(delivery.claim.server, {server} | (same if server in same else set()))
            self._sender.settle(connection, cursor, every)
        for delivery in deliveries:
            delivery.result.due |= every.due & delivery.claim.lanes

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        """As ``short_transaction``, on the connection that is open."""
        assert self._connection is not None  # noqa: S101 - for the type checker
        try:
            with self._connection.begin():
                yield self._connection
            self._used_at = time.monotonic()
        except Exception as error:
            discard_if_session_broken(self._connection, error)
            raise
