"""The worker for coroutine handlers."""

import asyncio
import contextvars
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError as CallCancelled
from contextlib import contextmanager, suppress
from typing import Any, Self, TypeVar, Unpack

from txbox import Outcome
from txbox.instrumentation import Hook
from txbox.messages import MessageType
from txbox.service import STOP_SECONDS
from txbox_workers.coroutines.batch_tasks import BatchTasks, LoopCalls
from txbox_workers.coroutines.options import DEFAULTS, AsyncWorkerOptions, for_functions
from txbox_workers.coroutines.stores import LOOK_SECONDS, ThreadedLedger, until_done
from txbox_workers.delivery import Source
from txbox_workers.options import lists_options
from txbox_workers.polling.poller import Poller
from txbox_workers.worker import Worker

T = TypeVar("T")

CANCEL_SECONDS = 10.0
"""How long a cancelled worker waits for its transactions to roll back."""


class AsyncWorker:
    """Processes the messages of one source, each exactly once in effect, with coroutine handlers.

    ::

        async def on_purchase(session, message):
            await session.execute(update(Account).where(...).values(...))

        async with AsyncWorker(source, inbox=AsyncInbox("billing"), engine=engine, handler=on_purchase):
            ...                                  # in a service that has other work: FastAPI's lifespan, say

        await worker.run()                       # or as a process: until SIGTERM; then it drains

    It gives all the guarantees of ``Worker``. If ``run`` is cancelled, it cancels the running handlers, rolls their
    transactions back, and hands their deliveries back.
    """

    @lists_options(AsyncWorkerOptions, **DEFAULTS)
    def __init__(self, source: Source, **options: Unpack[AsyncWorkerOptions]) -> None:
        """Make a worker. It does not connect before ``start`` or ``run``.

        Args:
            source: where deliveries come from.
            options: those of ``txbox_workers.coroutines.AsyncWorkerOptions``.

        Raises:
            TypeError: there is no such option.
            InvalidConfiguration: an option cannot work, or the source lacks a method.
        """
        of = type(self).__name__
        self._calls = LoopCalls()
        self._worker = LoopWorker(source, self._calls, of=of, **for_functions(of, AsyncWorkerOptions, options))

    @property
    def subscriber_id(self) -> str:
        """The consumer's name."""
        return self._worker.subscriber_id

    @property
    def source(self) -> Source:
        """Where deliveries come from."""
        return self._worker.source

    @property
    def counts(self) -> Mapping[Outcome, int]:
        """How many deliveries had which outcome since the worker was made."""
        return self._worker.counts

    @property
    def message_type(self) -> MessageType | None:
        """The type that bodies are read as for the handler; None if the handler takes the messages themselves."""
        return self._worker.message_type

    @property
    def running(self) -> bool:
        """Whether the worker runs; after a stop, whether something has not finished."""
        return self._worker.running

    @property
    def stopping(self) -> bool:
        """Whether the worker was told to stop. It then begins nothing more."""
        return self._worker.stopping

    def add_hook(self, hook: Hook) -> None:
        """Add a hook for every event, before the start. Any thread may call it. Raises like ``Worker.add_hook``."""
        self._worker.add_hook(hook)

    async def start(self) -> None:
        """Check the database and the source, start on this event loop, and return; raises like ``Worker.start``."""
        await self._start(asyncio.Event(), STOP_SECONDS)

    async def stop(self, timeout: float = STOP_SECONDS) -> bool:
        """Begin nothing more and finish what was begun, within ``timeout`` seconds; returns like ``Worker.stop``."""
        return bool(await _in_thread(lambda: self._worker.stop(timeout)))

    async def run(self, timeout: float = STOP_SECONDS, *, started: Callable[[], object] | None = None) -> bool:
        """Start, work until SIGTERM, SIGINT or another task's ``stop``, then finish what was begun.

        Signals are handled in the main thread only; a second signal ends the process at once. Arguments, result and
        errors are those of ``Worker.run``.

        Raises:
            asyncio.CancelledError: it was cancelled; what was in progress has been rolled back and handed back.
        """
        ended = asyncio.Event()
        stopped: asyncio.Future[bool] | None = None
        with _signals(ended):
            if (has_started := await self._start(ended, timeout)) is not None:
                return has_started
            try:
                if started is not None:
                    started()
                while not ended.is_set() and not self.stopping:
                    await _within(ended, LOOK_SECONDS)
                stopped = asyncio.ensure_future(self.stop(timeout))
                return await asyncio.shield(stopped)
            except BaseException:
                await self._give_up(stopped)
                raise

    async def _start(self, ended: asyncio.Event, timeout: float) -> bool | None:
        """Start in a thread. Return None, or what ``run`` returns if ``ended`` was set first and nothing has begun.

        A source or a database may block a start for ever. It is abandoned ``timeout`` seconds after ``ended``.
        """
        self._worker.refuse_running()  # before bind() replaces the loop that it runs on
        self._calls.bind(asyncio.get_running_loop())
        call = _call_in_thread(lambda: self._worker.start_within(timeout))
        asked = asyncio.ensure_future(ended.wait())
        try:
            await asyncio.wait([call, asked], return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                await self._end_start(call)
            return None if call.result() else False
        except CallCancelled:  # a check, by _end_start
            return True
        except asyncio.CancelledError:
            await until_done(call, CANCEL_SECONDS, self._tell_start)
            if call.done():
                call.exception()  # otherwise asyncio would warn that it was never retrieved
            await self._give_up(None)
            raise
        finally:
            asked.cancel()

    async def _end_start(self, call: "asyncio.Future[bool]") -> None:
        """Keep telling a start to stop, until it has ended or is abandoned."""
        while not call.done():
            self._tell_start()
            await asyncio.wait([call], timeout=LOOK_SECONDS)

    def _tell_start(self) -> None:
        self._worker.end_start()
        if not self.running:  # once it runs, the call may be a report
            self._calls.cancel_calls()

    async def _give_up(self, stopped: "asyncio.Future[bool] | None") -> None:
        """Cancel what is in progress and wait for it to end. ``stopped`` is a stop that already waits for that."""
        self._worker.call_off()  # before the batches end: they must not report the database as lost
        if stopped is None:
            stopped = asyncio.ensure_future(self.stop(CANCEL_SECONDS))
        await until_done(stopped, CANCEL_SECONDS, self._calls.cancel_batches)
        if ids := self._worker.under_way():
            _log.warning(
                "%s: cancelled %g s ago, and the handlers of these messages have not ended: %s; what they do may still "
                "be committed; have them raise CancelledError again where they catch it",
                self.subscriber_id,
                CANCEL_SECONDS,
                ", ".join(ids),
            )

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


class LoopWorker(Worker):
    """Runs its processor on an event loop. Its own methods are called from threads other than the loop's."""

    _on_loop = True

    def __init__(self, source: Source, calls: LoopCalls, *, of: str, **options: Any) -> None:
        """``of`` is the class name to use in errors."""
        self._of = of
        self._calls = calls
        self._tasks: BatchTasks | None = None
        super().__init__(source, **options)

    def refuse_running(self) -> None:
        self._refuse_running("make another one")

    def start_within(self, timeout: float) -> bool:
        """Start; return False if it was told to stop meanwhile and is still starting ``timeout`` seconds later."""
        with self._starting:
            self._make_ready()
            return self._has_started(timeout)

    def end_start(self) -> None:
        """Tell a worker that is starting to stop. It notices once the start has begun."""
        self._wake.put(None)

    def under_way(self) -> list[str]:
        return [] if self._tasks is None else self._tasks.under_way()

    def call_off(self) -> None:
        """Begin nothing more; ``stop`` waits for what was begun."""
        self._call_off()

    def _stopped(self, finished: bool) -> None:
        super()._stopped(finished)
        if finished and isinstance(ledger := self._options.ledger, ThreadedLedger):
            ledger.close()

    def _with_database(self, work: Callable[[], T]) -> T:
        # With a ledger alone, dead letters and reports may use a synchronous engine, which would block the loop.
        letters = self._options.dead_letters
        engine = self._options.engine or (None if letters is None else letters.engine)
        return self._calls.call(work) if engine is not None and engine.dialect.is_async else work()

    def _make_poller(self) -> Poller:
        self._tasks = BatchTasks(self._calls, self._options.threads, self._call_off)
        return self._prefetching_poller(self._tasks)  # whatever ``prefetch`` is: a thread cannot process for the loop

    def _give_way(self) -> None:
        """Do nothing: an event loop's pool hands out connections in the order in which they were requested."""


async def _in_thread(function: Callable[[], Any]) -> Any:
    """Run a blocking call in a thread and wait until it ends, even if cancelled."""
    call = _call_in_thread(function)
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        await until_done(call)
        if not call.cancelled():
            call.exception()  # otherwise asyncio would warn that it was never retrieved
        raise


def _call_in_thread(function: Callable[[], Any]) -> "asyncio.Future[Any]":
    """Call in a new thread: the loop's own threads may be busy with handlers, or with others that wait for this."""
    loop = asyncio.get_running_loop()
    call: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if call.cancelled():
            return
        if error is None:
            call.set_result(result)
        else:
            call.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as raised:  # noqa: BLE001 - the loop raises it
            error = raised
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run,), name="txbox-coroutines", daemon=True).start()
    return call


async def _within(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass


@contextmanager
def _signals(ended: asyncio.Event) -> Iterator[None]:
    """Set the event at the first SIGTERM or SIGINT; the second one has its default effect."""
    loop = asyncio.get_running_loop()
    before: dict[signal.Signals, Any] = {}

    def stop(number: signal.Signals) -> None:
        _log.info("%s: finishing what was begun; send it again to exit at once", number.name)
        ended.set()
        for one in before:
            loop.remove_signal_handler(one)

    for number in (signal.SIGTERM, signal.SIGINT):
        try:
            previous = signal.getsignal(number)
            loop.add_signal_handler(number, stop, number)
            before[number] = previous
        except (ValueError, RuntimeError, NotImplementedError):  # not the main thread, or not Unix
            break
    try:
        yield
    finally:
        for number, previous in before.items():
            loop.remove_signal_handler(number)
            if previous is not None:
                signal.signal(number, previous)


_log = logging.getLogger("txbox.service")
