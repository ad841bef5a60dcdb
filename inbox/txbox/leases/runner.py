"""Work under a lease: what is done for a message, from its acquisition to its end, once for functions and coroutines.

It is written as a generator that says what is to be done next, and is told what came of it. One driver does that for
functions, another one for coroutines::

    acquire ─┬─ ACQUIRED ──→ the work, while a keeper renews the lease ─┬─ returns ──→ complete, with its result
             ├─ COMPLETED ─→ the stored result                          └─ raises ───→ release; its error goes on
             └─ IN_FLIGHT ─→ pause and ask again, as long as was allowed; then InFlight

A process that is killed on the way leaves the lease behind, and the next one has it once it has run out.
"""

import asyncio
import inspect
import itertools
import json
import logging
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from txbox.backoff import Backoff
from txbox.errors import EffectUnknown, InFlight, InvalidConfiguration, LedgerError, ResultNotStored
from txbox.leases.lease import LEASE_SECONDS, Acquisition, Ended, Lease, LeaseState, elapsed, valid_lease_seconds
from txbox.leases.ledger import Ledger, require_ledger
from txbox.leases.renewer import LeaseKeeper
from txbox.outcome import Outcome
from txbox.postgres.sqlstates import TIMED_OUT, is_outage, sqlstate

__all__ = ["Done", "Ending", "Leased", "known_ending", "refuse_unfinished", "takes_lease"]

WAIT_BACKOFF = Backoff(first_seconds=0.05, longest_seconds=1.0)
"""Between looks at a message that another owner works on."""

STORE_BACKOFF = Backoff(first_seconds=0.1, longest_seconds=5.0)
"""Between tries to complete a message while the ledger's store cannot be reached."""


@dataclass(frozen=True, slots=True)
class Done:
    """That a message is done.

    Attributes:
        outcome: PROCESSED, if its work has run now; DUPLICATE, if it was done before.
        result: what the work returned, now or then; None if nothing was kept.
    """

    outcome: Outcome
    result: Any


@dataclass(frozen=True, slots=True)
class Ending:
    """How an attempt has ended, and what becomes of the count.

    Attributes:
        ended: as ``Ledger.release`` is told.
        forget_attempts: the same.
    """

    ended: Ended
    forget_attempts: bool = False


def known_ending(lease: Lease, error: BaseException) -> Ending:
    """Tell from an error how an attempt has ended: a handler that raises says that nothing has happened.

    Unless it says by ``EffectUnknown`` that it does not know; or has begun before under this lease; or was interrupted
    wherever it was: by a cancellation, by the server, as its transaction took too long, or by an outage of a database.
    Only the last one is no failure of the message.
    """
    timed_out = sqlstate(error) in TIMED_OUT
    if is_outage(error) and not timed_out:
        return Ending(Ended.NOT_COUNTED if lease.begun else Ended.NOT_MADE)
    unknown = timed_out or lease.begun_again or isinstance(error, EffectUnknown)
    if isinstance(error, Exception) and not unknown:
        return Ending(Ended.FAILED)
    return Ending(Ended.UNKNOWN if lease.begun else Ended.NOT_MADE)


class Leased:
    """Runs work under the leases of one ledger: what ``idempotent`` and the workers have in common."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        seconds: float = LEASE_SECONDS,
        wait_seconds: float = 0.0,
        keep_result: bool = False,
        encode: Callable[[Any], bytes | str] | None = None,
        decode: Callable[[bytes], Any] = json.loads,
        on_renewal_failure: Callable[[Lease, Exception], None] | None = None,
        on_release_failure: Callable[[Lease, Ending], None] | None = None,
    ) -> None:
        """Take the ledger; the arguments are those of ``idempotent``, under longer names.

        ``on_release_failure`` is told of an ending that the ledger could not be told, as its store is away.
        """
        require_ledger(ledger, "ledger")
        if not wait_seconds >= 0:
            raise InvalidConfiguration(f"wait must be at least 0 seconds, not {wait_seconds!r}")
        self._ledger = ledger
        self._seconds = valid_lease_seconds(seconds, "lease")
        self._wait_seconds = wait_seconds
        self._keep_result = keep_result
        self._encode = encode or _as_json
        self._decode = decode
        self._keeper = LeaseKeeper(ledger, on_renewal_failure)
        self._on_release_failure = on_release_failure

    def run(
        self,
        message_id: str,
        work: Callable[[Lease], Any],
        *,
        fingerprint: bytes | None = None,
        until: float | None = None,
        ends: Callable[[Lease, BaseException], Ending] = known_ending,
    ) -> Done:
        """Do the work of a message, unless it is done.

        Args:
            message_id: the message.
            work: is given the lease; it raises to fail.
            fingerprint: the SHA-256 of the payload, to have another one refused.
            until: a reading of ``elapsed`` after which no lease may last, as this process ends then.
            ends: is told of a failure before the message is released, and returns how the attempt has ended.

        Raises:
            InFlight, Mismatch, LeaseLost, LedgerError, ResultNotStored: as ``idempotent``; and what the work raises.
        """
        steps = self._steps(message_id, fingerprint, until, ends)
        step = next(steps)
        try:
            while True:
                try:
                    answer = _do(step, work)
                except BaseException as error:  # noqa: BLE001 - the generator decides, and lets it go on
                    step = steps.throw(error)
                else:
                    step = steps.send(answer)
        except StopIteration as end:
            done: Done = end.value
            return done

    async def run_async(
        self,
        message_id: str,
        work: Callable[[Lease], Awaitable[Any]],
        *,
        fingerprint: bytes | None = None,
        until: float | None = None,
        ends: Callable[[Lease, BaseException], Ending] = known_ending,
    ) -> Done:
        """Do the work of a message, unless it is done: ``run`` for coroutines. The ledger is called in threads.

        A cancellation is the work's: what the ledger was told is awaited first, so that no lease is left behind.
        """
        steps = self._steps(message_id, fingerprint, until, ends)
        cancelled: asyncio.CancelledError | None = None
        step = next(steps)
        try:
            while True:
                try:
                    if isinstance(step, _Call):
                        call, cancelled = await _to_its_end(step.function, cancelled)
                        answer = call.result()
                    elif cancelled is not None:
                        raise cancelled
                    else:
                        answer = await (asyncio.sleep(step.seconds) if isinstance(step, _Pause) else work(step.lease))
                except BaseException as error:  # noqa: BLE001 - as above
                    step = steps.throw(error)
                else:
                    step = steps.send(answer)
        except StopIteration as end:
            if cancelled is not None:
                raise cancelled from None
            done: Done = end.value
            return done
        except BaseException as error:
            if cancelled is not None and error is not cancelled:
                raise cancelled from error  # whoever has cancelled relies on it
            raise

    def _steps(
        self,
        message_id: str,
        fingerprint: bytes | None,
        until: float | None,
        ends: Callable[[Lease, BaseException], Ending],
    ) -> Generator["_Step", Any, Done]:
        """Say what is to be done next, and be told what came of it: the whole of it, without any waiting or calling."""
        acquisition = yield from self._acquire(message_id, fingerprint, until)
        if acquisition.state is LeaseState.COMPLETED:
            result = None if acquisition.result is None else self._decode(acquisition.result)
            return Done(Outcome.DUPLICATE, result)
        lease = acquisition.lease
        assert lease is not None  # noqa: S101 - for the type checker: it was acquired
        if lease.unknown_attempts:
            _log.warning(
                "%s: %s is attempt %d; %d before it ended in a way that nobody knows, and may have had their effect",
                lease.subscriber_id,
                lease.message_id,
                lease.attempt,
                lease.unknown_attempts,
            )
        mine = _own.set(_own.get() | {self._named(message_id)})
        try:
            with self._keeper.keep(lease, until=until):
                result = yield _Work(lease)
        except BaseException as error:
            ending = known_ending(lease, error)
            try:
                ending = ends(lease, error)
            finally:
                yield from self._release(lease, ending)
            raise
        finally:
            with suppress(ValueError):  # a coroutine that is thrown away ends wherever it is collected
                _own.reset(mine)
        encoded, problem = self._encoded(lease, result)
        yield from self._complete(lease, encoded, until)
        if problem is not None:
            raise problem
        return Done(Outcome.PROCESSED, result)

    def _acquire(
        self, message_id: str, fingerprint: bytes | None, until: float | None
    ) -> Generator["_Step", Any, Acquisition]:
        deadline = elapsed() + self._wait_seconds
        for look in itertools.count(1):
            seconds = self._seconds if until is None else max(min(self._seconds, until - elapsed()), _SHORTEST_SECONDS)

            def ask(seconds: float = seconds) -> Acquisition:
                return self._ledger.acquire(message_id, seconds=seconds, fingerprint=fingerprint)

            acquisition: Acquisition = yield _Call(ask)
            if acquisition.state is not LeaseState.IN_FLIGHT:
                return acquisition
            if self._named(message_id) in _own.get():
                raise InvalidConfiguration(
                    f"{message_id} waits for itself: its own work has asked for its lease in {self._ledger!r}; give "
                    "the function that is called in there a ledger of its own, with another subscriber"
                )
            left = deadline - elapsed()
            if left <= 0:
                raise InFlight(self._ledger.subscriber_id, (message_id,), seconds=acquisition.seconds)
            yield _Pause(min(WAIT_BACKOFF.seconds(look), left))
        raise AssertionError("unreachable")

    def _named(self, message_id: str) -> tuple[str, str]:
        """Return what a message is called among all that the running work has leases of."""
        return repr(self._ledger), message_id

    def _release(self, lease: Lease, ending: Ending) -> Generator["_Step", Any, None]:
        """Free the message; if that fails, it will be free when its lease has run out, and the work's error matters."""
        try:
            yield _Call(lambda: self._ledger.release(lease, ending.ended, forget_attempts=ending.forget_attempts))
        except Exception as error:  # noqa: BLE001 - see above
            _log.warning("%r could not be released: %s", lease, error)
            if self._on_release_failure and isinstance(error, LedgerError) and not error.permanent:
                self._on_release_failure(lease, ending)

    def _complete(self, lease: Lease, encoded: bytes | None, until: float | None) -> Generator["_Step", Any, None]:
        """Complete the message; the work is done, so while the lease lasts, this is worth any number of tries."""
        for tries in itertools.count(1):
            try:
                yield _Call(lambda: self._ledger.complete(lease, encoded))
            except LedgerError as error:
                left = lease.seconds_left
                if until is not None:  # who says when it ends needs some of the time for saying what came of it
                    left = min(left, until - _TELLING_SECONDS - elapsed())
                if error.permanent or left <= 0:
                    raise
                _log.warning("%r could not be completed, and will be tried again: %s", lease, error)
                with self._keeper.keep(lease, until=until):
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


def refuse_unfinished(result: object) -> None:
    """Refuse what a handler has returned, if that means that its work is not done.

    Raises:
        InvalidConfiguration: it is something to await, or a generator.
    """
    if result is None or not (inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result)):
        return
    if inspect.iscoroutine(result):
        result.close()  # else Python warns of it
    raise InvalidConfiguration(
        f"the handler has returned a {type(result).__name__}, so its work is not done; make it a plain function, which "
        "calls asyncio.run(…) if need be; idempotent also takes the coroutine function itself"
    )


def takes_lease(handler: Callable[..., Any]) -> bool:
    """Whether a handler wants its lease: it names a parameter ``lease``.

    Raises:
        InvalidConfiguration: it does, and takes it by position only.
    """
    try:
        signature = inspect.signature(handler)
    except (TypeError, ValueError):
        return False  # some functions of C do not say
    parameter = signature.parameters.get("lease")
    if parameter is not None and parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
        raise InvalidConfiguration("a handler takes its lease by name; its parameter lease is positional-only")
    if parameter is not None and parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
        *_, last = (each for each in signature.parameters.values() if each.kind is parameter.kind)
        if last is not parameter:
            raise InvalidConfiguration("a handler's parameter lease has to be its last one, or one by name only")
    return parameter is not None and parameter.kind in (
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    )


@dataclass(frozen=True, slots=True)
class _Call:
    """Call the ledger."""

    function: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class _Pause:
    """Let time pass: nothing signals that another owner is done, or that a store has recovered."""

    seconds: float


@dataclass(frozen=True, slots=True)
class _Work:
    """Do the work, under this lease."""

    lease: Lease


_Step = _Call | _Pause | _Work

_SHORTEST_SECONDS = 0.001

_TELLING_SECONDS = 1.0

_own: ContextVar[frozenset[tuple[str, str]]] = ContextVar("txbox_leases", default=frozenset())
"""The messages that the running work has leases of: it must not wait for itself."""


def _do(step: _Step, work: Callable[[Lease], Any]) -> Any:
    match step:
        case _Call(function):
            return function()
        case _Pause(seconds):
            return time.sleep(seconds)
        case _Work(lease):
            result = work(lease)
            refuse_unfinished(result)
            return result


async def _to_its_end(
    function: Callable[[], Any], cancelled: asyncio.CancelledError | None
) -> tuple["asyncio.Future[Any]", asyncio.CancelledError | None]:
    """Call in a thread, and wait for it even if cancelled meanwhile; return the call, and the cancellation."""
    call = asyncio.ensure_future(asyncio.to_thread(function))
    while not call.done():
        try:
            await asyncio.wait([call])
        except asyncio.CancelledError as error:
            cancelled = error
    return call, cancelled


def _as_json(result: Any) -> bytes:
    return json.dumps(result, allow_nan=False, ensure_ascii=False).encode()


_log = logging.getLogger("txbox")
