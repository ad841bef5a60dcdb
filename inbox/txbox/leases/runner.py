"""The runner: does a message's work under its lease, from acquisition to end, for functions and coroutines.

The steps are a generator that yields what to do next and receives the result. One driver performs them for functions,
another for coroutines::

    acquire ─┬─ ACQUIRED ──→ the work, while its lease is renewed ─┬─ returns ──→ complete, with its result
             ├─ COMPLETED ─→ the stored result                     └─ raises ───→ release; its error goes on
             └─ IN_FLIGHT ─→ pause and ask again, as long as was allowed; then InFlight

A process that is killed leaves its lease behind; the next owner gets it once it has run out.
"""

import asyncio
import itertools
import json
import logging
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from txbox.backoff import Backoff
from txbox.errors import EffectUnknown, Expired, InFlight, InvalidConfiguration, LedgerError, ResultNotStored
from txbox.leases.handlers import refuse_unfinished
from txbox.leases.lease import LEASE_SECONDS, Acquisition, AttemptEnd, Lease, LeaseState, elapsed, valid_lease_seconds
from txbox.leases.ledger import Ledger, require_ledger
from txbox.leases.renewer import LeaseRenewer
from txbox.outcome import Outcome
from txbox.postgres.drivers.greenlets import raise_if_cancelled, sleep
from txbox.postgres.sqlstates import TIMED_OUT, is_outage, sqlstate

WAIT_BACKOFF = Backoff(first_seconds=0.05, longest_seconds=1.0)
"""The delay between requests for a message that another owner is working on."""

STORE_BACKOFF = Backoff(first_seconds=0.1, longest_seconds=5.0)
"""The delay between tries to complete a message while the ledger's store cannot be reached."""

SHORTEST_LEASE_SECONDS = 0.001

REPORT_SECONDS = 1.0
"""How long before its given end a process needs to report what became of its work."""


@dataclass(frozen=True, slots=True)
class WorkResult:
    """The result of a completed message's work."""

    outcome: Outcome  # PROCESSED if the work has run now; DUPLICATE if it was done before
    result: Any  # what the work returned, now or then; None if nothing was kept


@dataclass(frozen=True, slots=True)
class Release:
    """The arguments with which ``Ledger.release`` is called."""

    ended: AttemptEnd
    forget_attempts: bool = False


def release_after(lease: Lease, error: BaseException) -> Release:
    """Return how to release a message after an error of its handler.

    A message that is too old to judge was not begun; its next lease is its first again. As a rule, an error means that
    nothing has happened. The effect is unknown if the error is ``EffectUnknown``, if the work had already begun before
    under this lease, or if it was interrupted: by a cancellation, by the server because its transaction took too long,
    or by an outage of a database. Only an outage does not count as the message's failure.
    """
    if isinstance(error, Expired) and not lease.begun:
        return Release(AttemptEnd.NOT_MADE)
    timed_out = sqlstate(error) in TIMED_OUT
    if is_outage(error) and not timed_out:
        return Release(AttemptEnd.NOT_COUNTED if lease.begun else AttemptEnd.NOT_MADE)
    unknown = timed_out or lease.begun_again or isinstance(error, EffectUnknown)
    if isinstance(error, Exception) and not unknown:
        return Release(AttemptEnd.FAILED)
    return Release(AttemptEnd.UNKNOWN if lease.begun else AttemptEnd.NOT_MADE)


OnError = Callable[[Lease, BaseException], Release]


def refuse_expired(ledger: Ledger, lease: Lease, sent_at: datetime | None) -> None:
    """Raise ``Expired`` if a message is too old to judge and no attempt at it is known to have failed.

    A message with a failed attempt has been judged: it is known, and not completed. An attempt of unknown end may have
    ended before it was judged. Ledgers without horizons, such as the one in DynamoDB, do not judge.
    """
    find_expired = getattr(ledger, "find_expired", None)
    has_failed = lease.attempt - lease.unknown_attempts > 1
    if not has_failed and find_expired is not None and (expired := find_expired(lease, sent_at)) is not None:
        raise expired


class LeaseRunner:
    """Runs work under the leases of one ledger, for ``idempotent`` and for workers."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        lease_seconds: float = LEASE_SECONDS,
        wait_seconds: float = 0.0,
        keep_result: bool = False,
        encode: Callable[[Any], bytes | str] | None = None,
        decode: Callable[[bytes], Any] = json.loads,
        on_renewal_failure: Callable[[Lease, Exception], None] | None = None,
        on_release_failure: Callable[[Lease, Release], None] | None = None,
    ) -> None:
        """Take the ledger, and arguments of ``idempotent``.

        ``on_renewal_failure`` gets a lease that could not be renewed; ``on_release_failure`` gets a release that did
        not reach the store.
        """
        require_ledger(ledger, "ledger")
        if not wait_seconds >= 0:
            raise InvalidConfiguration(f"wait_seconds must be at least 0, not {wait_seconds!r}")
        self._ledger = ledger
        self._lease_seconds = valid_lease_seconds(lease_seconds, "lease_seconds")
        self._wait_seconds = wait_seconds
        self._keep_result = keep_result
        self._encode = encode or _as_json
        self._decode = decode
        self._renewer = LeaseRenewer(ledger, on_renewal_failure)
        self._on_release_failure = on_release_failure

    def run(
        self,
        message_id: str,
        work: Callable[[Lease], Any],
        *,
        fingerprint: bytes | None = None,
        until: float | None = None,
        on_error: OnError = release_after,
    ) -> WorkResult:
        """Do a message's work unless it is done; raise as ``idempotent`` does, and what the work raises.

        ``fingerprint`` is the payload's SHA-256, to refuse another payload. ``until`` is a reading of ``elapsed`` at
        which this process ends, so no lease may last longer. ``on_error`` gets the error of the work before the message
        is released, and returns how to release it.
        """
        steps = self._steps(message_id, fingerprint, until, on_error)
        step = next(steps)
        try:
            while True:
                try:
                    result = _do(step, work)
                except BaseException as error:  # noqa: BLE001 - the generator decides, and reraises it
                    step = steps.throw(error)
                else:
                    step = steps.send(result)
        except StopIteration as end:
            done: WorkResult = end.value
            return done

    async def run_async(
        self, message_id: str, work: Callable[[Lease], Awaitable[Any]], *, fingerprint: bytes | None = None
    ) -> WorkResult:
        """Do a message's work unless it is done: ``run`` for coroutines. The ledger is called in threads.

        A cancellation ends the work. A ledger call under way is awaited first, so that no lease is left behind.
        """
        steps = self._steps(message_id, fingerprint, None, release_after)
        cancelled: asyncio.CancelledError | None = None
        step = next(steps)
        try:
            while True:
                try:
                    if isinstance(step, _LedgerCall):
                        call, cancelled = await _finish(step.function, cancelled)
                        result = call.result()
                    elif cancelled is not None:
                        raise cancelled
                    else:
                        result = await (asyncio.sleep(step.seconds) if isinstance(step, _Pause) else work(step.lease))
                except BaseException as error:  # noqa: BLE001 - as above
                    step = steps.throw(error)
                else:
                    step = steps.send(result)
        except StopIteration as end:
            if cancelled is not None:
                raise cancelled from None
            done: WorkResult = end.value
            return done
        except BaseException as error:
            if cancelled is not None and error is not cancelled:
                raise cancelled from error  # the caller that cancelled relies on it
            raise

    def _steps(
        self, message_id: str, fingerprint: bytes | None, until: float | None, on_error: OnError
    ) -> Generator["_Step", Any, WorkResult]:
        """Yield what to do next, and receive its result: all decisions, without waiting or calling."""
        acquisition = yield from self._acquire(message_id, fingerprint, until)
        if acquisition.state is LeaseState.COMPLETED:
            result = None if acquisition.result is None else self._decode(acquisition.result)
            return WorkResult(Outcome.DUPLICATE, result)
        lease = acquisition.lease
        assert lease is not None  # noqa: S101 - for the type checker: it was acquired
        if lease.unknown_attempts:
            _log.warning(
                "%s: %s is attempt %d; %d before it may have had their effect: they were neither completed nor "
                "released as failed",
                lease.subscriber_id,
                lease.message_id,
                lease.attempt,
                lease.unknown_attempts,
            )
        mine = _own.set(_own.get() | {self._key(message_id)})
        try:
            with self._renewer.renewing(lease, until=until):
                result = yield _Work(lease)
        except BaseException as error:
            release = release_after(lease, error)
            try:
                release = on_error(lease, error)
            finally:
                yield from self._release(lease, release)
            raise
        finally:
            with suppress(ValueError):  # a dropped coroutine ends in the garbage collector's context
                _own.reset(mine)
        encoded, problem = self._encoded(lease, result)
        yield from self._complete(lease, encoded, until)
        if problem is not None:
            raise problem
        return WorkResult(Outcome.PROCESSED, result)

    def _acquire(
        self, message_id: str, fingerprint: bytes | None, until: float | None
    ) -> Generator["_Step", Any, Acquisition]:
        deadline = elapsed() + self._wait_seconds
        for tries in itertools.count(1):
            length = self._lease_seconds if until is None else min(self._lease_seconds, until - elapsed())
            length = max(length, SHORTEST_LEASE_SECONDS)

            def ask(lease_seconds: float = length) -> Acquisition:
                return self._ledger.acquire(message_id, lease_seconds=lease_seconds, fingerprint=fingerprint)

            acquisition: Acquisition = yield _LedgerCall(ask)
            if acquisition.state is not LeaseState.IN_FLIGHT:
                return acquisition
            if self._key(message_id) in _own.get():
                raise InvalidConfiguration(
                    f"{message_id} waits for itself: its own work has asked for its lease in {self._ledger!r}; give "
                    "the function that is called in there a ledger of its own, with another subscriber"
                )
            left = deadline - elapsed()
            if left <= 0:
                raise InFlight(self._ledger.subscriber_id, (message_id,), seconds=acquisition.seconds_left)
            yield _Pause(min(WAIT_BACKOFF.seconds(tries), left))
        raise AssertionError("unreachable")

    def _key(self, message_id: str) -> tuple[str, str]:
        return repr(self._ledger), message_id

    def _release(self, lease: Lease, release: Release) -> Generator["_Step", Any, None]:
        """Free the message. If that fails, it is free when its lease runs out; the work's error matters more."""
        try:
            yield _LedgerCall(
                lambda: self._ledger.release(lease, release.ended, forget_attempts=release.forget_attempts)
            )
        except Exception as error:  # noqa: BLE001 - see above
            _log.warning("%r could not be released, and is free when it has run out: %s", lease, error)
            if self._on_release_failure and isinstance(error, LedgerError) and not error.permanent:
                self._on_release_failure(lease, release)

    def _complete(self, lease: Lease, encoded: bytes | None, until: float | None) -> Generator["_Step", Any, None]:
        """Complete the message. The work is done, so this is retried while the lease lasts."""
        for tries in itertools.count(1):
            try:
                yield _LedgerCall(lambda: self._ledger.complete(lease, encoded))
            except LedgerError as error:
                left = lease.seconds_left
                if until is not None:
                    left = min(left, until - REPORT_SECONDS - elapsed())
                if error.permanent or left <= 0:
                    raise
                _log.warning("%r could not be completed, and will be tried again: %s", lease, error)
                with self._renewer.renewing(lease, until=until):
                    yield _Pause(min(STORE_BACKOFF.seconds(tries), left))
            else:
                return

    def _encoded(self, lease: Lease, result: Any) -> tuple[bytes | None, ResultNotStored | None]:
        if result is None or not self._keep_result:
            return None, None
        try:
            encoded = self._encode(result)
            return encoded.encode() if isinstance(encoded, str) else bytes(encoded), None
        except Exception as error:  # noqa: BLE001 - it is the host's code, and the work is done
            problem = ResultNotStored(lease.subscriber_id, lease.message_id, f"{type(error).__name__}: {error}")
            problem.__cause__ = error
            return None, problem


@dataclass(frozen=True, slots=True)
class _LedgerCall:
    function: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class _Pause:
    """A wait for another owner or for the store, neither of which signals when it is ready."""

    seconds: float


@dataclass(frozen=True, slots=True)
class _Work:
    lease: Lease


_Step = _LedgerCall | _Pause | _Work

_own: ContextVar[frozenset[tuple[str, str]]] = ContextVar("txbox_leases", default=frozenset())
"""The messages whose leases the running work holds: it must not wait for itself."""


def _do(step: _Step, work: Callable[[Lease], Any]) -> Any:
    if not isinstance(step, _LedgerCall):
        raise_if_cancelled()  # it came during a ledger call, which was awaited first
    match step:
        case _LedgerCall(function):
            return function()
        case _Pause(seconds):
            return sleep(seconds)
        case _Work(lease):
            result = work(lease)
            refuse_unfinished(result)
            return result


async def _finish(
    function: Callable[[], Any], cancelled: asyncio.CancelledError | None
) -> tuple["asyncio.Future[Any]", asyncio.CancelledError | None]:
    """Call in a thread, and wait for it even if cancelled meanwhile; return the call and the cancellation."""
    call = asyncio.ensure_future(asyncio.to_thread(function))
    while not call.done():
        try:
            await asyncio.wait([call])
        except asyncio.CancelledError as error:
            cancelled = error
    return call, cancelled


def _as_json(result: Any) -> bytes:
    return json.dumps(result, allow_nan=False, ensure_ascii=False).encode()


_log = logging.getLogger("txbox.leases")
