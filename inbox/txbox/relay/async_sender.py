"""The async sender: one thread that claims, reads and settles for hundreds of coroutines.

::

    Scheduler ── claims of many destinations ──→ ClaimSession: claim, read ──→ EventLoop: a delivery for each claim
        ↑                                             ↑                             │ Dispatcher ──→ AsyncPublisher
        └────────────── results ──────────── settle, and release the lanes ←────────┘ one after the other, as they end

Each delivery ends by itself and holds only its own lanes, so one that hangs delays no other. All that end during one
settling transaction are settled together by the next; ``ClaimSettler`` keeps those that could not be settled. Nothing
here waits for the loop. The loop waits only for a check of the claims, after this process did not run for a while.
"""

import asyncio
import logging
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from sqlalchemy import Engine

from txbox.errors import BrokerError
from txbox.postgres.sqlstates import OUT_OF_MEMORY, sqlstate
from txbox.relay.async_publishers import EventLoop
from txbox.relay.async_settler import ClaimSettler
from txbox.relay.claim_session import ClaimSession, SendingClaim
from txbox.relay.dispatcher import CLAIM_CHECKS, Dispatcher
from txbox.relay.pending import FEW_LANES, Claim
from txbox.relay.scheduler import OUTAGE_BACKOFF, DestinationChange, Scheduler
from txbox.relay.sender import ClaimResult, RelayStatements, Sender
from txbox.relay.settlement import Row
from txbox.text import text_of

CONCURRENCY = 500
"""Claims at once; each has one call of a publisher under way."""

CLAIM_MESSAGES = 50
"""Most messages per claim: what is sent again, per destination, if the relay is killed."""

CLAIM_SECONDS = (1.0, 3.0)
"""Range of the time, in seconds, after which a claim makes no further call and is settled when its last call ends.
Random, so that claims do not end together."""

MOST_LANES = 2_000
"""Most lanes claimed at once. Each is a lock of Postgres, which by default has a few over 6,400 for all sessions."""

FEWER_SECONDS = 120.0
"""After the server's lock table was full, half as many lanes are claimed for this time; then twice as many again."""

MOST_BATCH_BYTES = 4
"""Nothing more is read while the deliveries hold this many times the bytes of a batch."""

SESSION_SECONDS = 60.0
"""After this time another session claims, so that no transaction grows old; the old one ends with its last claim."""

SPARE_SECONDS = 0.1
"""How long a session without a claim is kept for the next one: beginning and ending one takes as long as a claim."""

MOST_SESSIONS = 2
"""Most sessions that have claims. While the older one has some, the newer one goes on, however old it is."""

CHECKED_SECONDS = 0.02
"""Pause between the loop's looks for a check of the claim, after this process did not run for a while."""

READY_SECONDS = 0.1
"""Pause between looks whether the loop has begun; nothing is claimed before."""


class ClaimLost(Exception):
    """Other relays may have taken what a delivery was to send."""


class AsyncSender:
    """Sends messages to destinations with an async publisher. One thread calls ``run``."""

    def __init__(
        self,
        engine: Engine,
        statements: RelayStatements,
        sender: Sender,
        dispatcher: Dispatcher,
        scheduler: Scheduler,
        loop: EventLoop,
        *,
        batch_size: int,
        batch_bytes: int,
        publish_timeout_seconds: float,
        report: Callable[[ClaimResult, DestinationChange], None],
        on_failure: Callable[[BaseException, float], None],
        wait: Callable[[float], object],
    ) -> None:
        """Store the collaborators.

        ``report`` gets the result of a claim. ``on_failure`` gets a database error and for how many seconds nothing is
        sent after it. ``wait`` waits for that many seconds, or until a stop.
        """
        self._engine = engine
        self._statements = statements
        self._sender = sender
        self._dispatcher = dispatcher
        self._scheduler = scheduler
        self._loop = loop
        self._claim_messages = min(batch_size, CLAIM_MESSAGES)
        self._most_bytes = MOST_BATCH_BYTES * batch_bytes
        self._check_seconds = publish_timeout_seconds / CLAIM_CHECKS
        self._report = report
        self._on_failure = on_failure
        self._wait = wait
        self._settler = ClaimSettler(
            engine,
            sender,
            hold_seconds=publish_timeout_seconds,
            check_claims=self._check_sessions,
            on_failure=on_failure,
        )
        self._sessions: list[ClaimSession] = []  # the last one claims; earlier ones end with their claims
        self._asked = -math.inf  # when the pool last had no connection to give
        self._taken: list[Claim] = []  # not read yet
        self._deliveries: set[SendingClaim] = set()
        self._bytes = 0
        self._fewer_lanes, self._full_at = MOST_LANES, 0.0
        self._ended: deque[SendingClaim] = deque()  # the loop has finished with them
        self._stuck: deque[SendingClaim] = deque()  # their coroutine keeps running although it was cancelled
        self._time_is_over = False

    def run(self) -> None:
        """Send until the scheduler is closed and everything begun is settled."""
        failures = 0
        while not self._scheduler.closed or self._deliveries:
            try:
                self._work()
                failures = 0
            except BaseException as error:  # noqa: BLE001 - nothing has changed, and the work is tried again
                if sqlstate(error) == OUT_OF_MEMORY:
                    self._claim_fewer()
                self._lose_all()
                failures += 1
                pause = OUTAGE_BACKOFF.seconds(failures)
                self._on_failure(error, pause)
                self._wait(pause)
        for session in self._sessions:
            session.abandon()
        self._sessions = []
        self._settler.close()
        self._loop.close()

    def cancel(self) -> None:
        """Cut short a stop whose time is over. Any thread may call this.

        Calls under way are cancelled: what was not confirmed counts as not sent. What could not be settled is tried
        once more.
        """
        self._time_is_over = True
        self._loop.cancel()
        self._scheduler.wake()

    def _work(self) -> None:
        self._taken = self._scheduler.take_async(self._room(), seconds=self._seconds())
        for delivery in _all_of(self._stuck):
            if delivery in self._deliveries and not delivery.lost:
                delivery.lost = True
                delivery.session.release(delivery.claim.lanes)
        ended = [delivery for delivery in _all_of(self._ended) if delivery in self._deliveries]
        for delivery in ended:
            if delivery.lost:
                self._finish_lost(delivery)
        self._settle([delivery for delivery in ended if not delivery.lost])
        if self._taken:
            if self._settler.works or self._may_try:
                self._begin(self._taken)
            else:
                for claim in self._taken:
                    self._scheduler.finish(claim, ClaimResult(fresh=dict(claim.fresh), due=set(claim.due)))
            self._taken = []
        self._keep_sessions()

    def _room(self) -> int:
        """Return how many more lanes may be claimed."""
        if not self._loop.is_ready or self._bytes >= self._most_bytes:
            return 0
        if not self._settler.works:
            return int(self._may_try)
        since_full = time.monotonic() - self._full_at
        most = min(self._fewer_lanes * 2.0 ** min(since_full // FEWER_SECONDS, 10), MOST_LANES)
        return max(int(most) - self._claimed_lanes, 0)

    @property
    def _may_try(self) -> bool:
        """Whether one claim may test if settlements are still refused, because nothing else is left to show it."""
        return self._settler.answers and not self._has_claims

    @property
    def _has_claims(self) -> bool:
        """Whether anything under way can still be settled; a lost delivery may run for ever."""
        return any(not delivery.lost for delivery in self._deliveries)

    @property
    def _claimed_lanes(self) -> int:
        return sum(len(session.lanes) for session in self._sessions)

    def _claim_fewer(self) -> None:
        """Claim fewer lanes than the try that failed, or the same lanes would be lost and sent again, over and over."""
        tried = self._claimed_lanes + sum(len(claim.lanes) for claim in self._taken)
        self._fewer_lanes, self._full_at = max(tried // 2, FEW_LANES), time.monotonic()

    def _seconds(self) -> float:
        """Return the seconds until there is something to do, whatever happens."""
        checks = (
            session.checked_at + (self._check_seconds if session.lanes else SPARE_SECONDS) for session in self._sessions
        )
        seconds = max(min([self._settler.next_try, *checks]) - time.monotonic(), 0.0)
        return seconds if self._loop.is_ready else min(seconds, READY_SECONDS)

    # --- claims ------------------------------------------------------------------------------------------------------

    def _begin(self, claims: Sequence[Claim]) -> None:
        """Claim and read for all of them in one round trip, and start their deliveries."""
        if not self._has_claims:  # otherwise it has one; a lost one must not cost what is under way
            self._settler.open()
        session, result = self._session(), ClaimResult()
        merged = Claim(
            {lane: position for claim in claims for lane, position in claim.fresh.items()},
            frozenset().union(*(claim.due for claim in claims)),
            claims[0].server,
            claims[0].generation,
        )
        rows, held = session.read(merged, result, limit=self._claim_messages * len(claims))
        by_lane: dict[int, list[Row]] = {}
        rows_of = {lane: by_lane.setdefault(min(claim.lanes), []) for claim in claims for lane in claim.lanes}
        for row in rows:
            rows_of[row.lane].append(row)
        started: list[SendingClaim] = []
        others: list[tuple[Claim, ClaimResult]] = []
        for claim in claims:
            own = ClaimResult(
                locked=claim.lanes & result.locked,
                fresh={lane: result.fresh[lane] for lane in claim.lanes if lane in result.fresh},
                due=set(claim.lanes & result.due),
            )
            if not (found := by_lane[min(claim.lanes)]):
                others.append((claim, own))
            elif not self._dispatcher.all_async and not self._dispatcher.is_async(found):
                others.append((claim, ClaimResult(fresh=dict(claim.fresh), due=set(claim.due), is_async=False)))
            else:
                # Keys that have come due may all belong to one destination.
                self._sender.leave(found[self._claim_messages :], own)
                del found[self._claim_messages :]
                own.is_async = True
                size = sum(len(row.message.body) for row in found)
                started.append(SendingClaim(claim, session, found, held, own, size))
        self._deliveries.update(started)
        self._taken = [claim for claim, _ in others]  # if what follows fails, each claim is given back only once
        self._bytes += sum(delivery.size for delivery in started)
        self._loop.start((partial(self._deliver, delivery), partial(self._end, delivery)) for delivery in started)
        session.release(lane for claim, _ in others for lane in claim.lanes)
        for claim, own in others:
            self._scheduler.finish(claim, own)

    def _session(self) -> ClaimSession:
        """Return the session that claims: if it is old, a new one, if the pool has one."""
        sessions, now = self._sessions, time.monotonic()
        if sessions and (
            len(sessions) == MOST_SESSIONS or now <= max(sessions[-1].began, self._asked) + SESSION_SECONDS
        ):
            return sessions[-1]
        self._check_sessions()  # nothing checks them while we wait for the pool
        try:
            sessions.append(ClaimSession(self._engine, self._statements, self._sender))
        except Exception as error:
            if not sessions:
                raise
            # The pool has none to give; that is no reason to lose what is under way and send it again.
            _log.warning("a session older than %g s claims, as there is no other: %s", SESSION_SECONDS, text_of(error))
            self._asked = time.monotonic()
        return sessions[-1]

    def _keep_sessions(self) -> None:
        """End sessions without a claim, except a spare one, and check the others: the server ends a silent one."""
        for session in list(self._sessions):
            silent = time.monotonic() - session.checked_at
            if not session.lanes and (session is not self._sessions[-1] or silent >= SPARE_SECONDS):
                self._sessions.remove(session)
                session.end()
            elif session.lanes and silent > self._check_seconds:
                session.check()
        if not self._sessions and not self._has_claims:
            self._settler.close()

    def _check_sessions(self) -> None:
        for session in self._sessions:
            session.check()

    def _lose_all(self) -> None:
        """Give everything up and stop the loop from sending it: the whole outbox is read again."""
        for session in self._sessions:
            session.abandon()
        self._sessions = []
        self._settler.close()
        for claim in self._taken:
            self._scheduler.fail(claim)
        self._taken = []
        for delivery in [delivery for delivery in self._deliveries if not delivery.lost]:
            delivery.lost = True
            self._scheduler.fail(delivery.claim)
            self._forget(delivery)
        self._loop.cancel()

    # --- in the loop -------------------------------------------------------------------------------------------------

    async def _deliver(self, delivery: SendingClaim) -> None:
        try:
            await self._dispatcher.dispatch_async(
                self._sender.sendable(delivery.rows, delivery.held),
                delivery.dispatched,
                check_claim=partial(self._stands, delivery),
                wait_entered=self._loop.wait_entered,
                # A new destination gets one call first; others wait for their first.
                seconds=random.uniform(*CLAIM_SECONDS) if delivery.claim.answered else 0.0,  # noqa: S311 - no secret
                on_stuck=partial(self._on_stuck, delivery),
            )
        except (asyncio.CancelledError, ClaimLost):
            pass  # what was confirmed before is settled, if it still can be
        except Exception as error:  # noqa: BLE001 - not a publisher's: raising might repeat it at once, for ever
            delivery.dispatched.outage = BrokerError(f"an unexpected error: {text_of(error)}")

    def _end(self, delivery: SendingClaim) -> None:
        self._ended.append(delivery)
        self._scheduler.wake()

    async def _stands(self, delivery: SendingClaim) -> None:
        """Wait until the claim was checked recently: this process may have been stopped for an hour."""
        while not delivery.lost and time.monotonic() - delivery.session.checked_at > 2 * self._check_seconds:
            self._scheduler.wake()
            await asyncio.sleep(CHECKED_SECONDS)
        if delivery.lost:
            raise ClaimLost

    def _on_stuck(self, delivery: SendingClaim) -> None:
        self._stuck.append(delivery)
        self._scheduler.wake()

    # --- settling ----------------------------------------------------------------------------------------------------

    def _settle(self, ended: Sequence[SendingClaim]) -> None:
        """Settle the deliveries that have ended, release their lanes, and give the claims back."""
        if self._scheduler.closed:
            self._settler.hurry()
        settled = self._settler.settle(ended, last_try=self._time_is_over)
        for delivery in settled.done:
            delivery.session.release(delivery.claim.lanes)
            self._forget(delivery)
            self._report(delivery.result, self._scheduler.finish(delivery.claim, delivery.result))
        for delivery in settled.given_up:
            delivery.session.release(delivery.claim.lanes)
            self._forget(delivery)
            self._scheduler.fail(delivery.claim)

    def _finish_lost(self, delivery: SendingClaim) -> None:
        """Give back a lost claim once its coroutine has ended."""
        claim, dispatched = delivery.claim, delivery.dispatched
        result = ClaimResult(fresh=dict(claim.fresh), due=set(claim.due), outage=dispatched.outage, is_async=True)
        result.destination = delivery.rows[0].message.destination
        self._forget(delivery)
        self._report(result, self._scheduler.finish(claim, result))

    def _forget(self, delivery: SendingClaim) -> None:
        self._deliveries.discard(delivery)
        self._bytes -= delivery.size


def _all_of(deliveries: "deque[SendingClaim]") -> Iterator[SendingClaim]:
    while deliveries:
        yield deliveries.popleft()


_log = logging.getLogger("txbox.relay")
