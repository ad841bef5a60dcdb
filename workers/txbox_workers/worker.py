"""The worker: take deliveries from a source, process them, and settle them with the source.

Each message goes this way, in one thread or through several (``polling``)::

    receive → process (transactions) → ack what has committed, hand back what has not

The ack comes after the commit, so a crash in between leads to a redelivery, which the inbox rejects.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from typing import TypeVar, Unpack

from txbox import InvalidConfiguration, Outcome, TxboxError
from txbox.instrumentation import (
    DatabaseLost,
    DatabaseRestored,
    Drained,
    Event,
    HeartbeatFailed,
    Hook,
    Paused,
    Resumed,
    Retried,
    Stopped,
    emit,
)
from txbox.instrumentation.logs import log_event
from txbox.messages import MessageType
from txbox.operations.pauses import Pause
from txbox.postgres.drivers.greenlets import GreenletEvent
from txbox.service import Service
from txbox_workers.consumer_spans import ConsumerSpans
from txbox_workers.delivery import Delivery, Source, require_source, settles_in_transaction
from txbox_workers.options import WorkerOptions, lists_options, valid_options
from txbox_workers.polling.activity import Activity
from txbox_workers.polling.context import PollingContext
from txbox_workers.polling.poller import Poller, SequentialPoller
from txbox_workers.polling.prefetching_poller import BatchConsumer, BatchThreads, PrefetchingPoller
from txbox_workers.polling.settler import source_errors_logged
from txbox_workers.processing import DatabaseUnavailable, ProcessorContext, make_processor
from txbox_workers.reporter import REPORT_SECONDS, WorkerFigures, WorkerReporter
from txbox_workers.visibility_heartbeat import VisibilityHeartbeat

__all__ = ["Worker"]

T = TypeVar("T")


class Worker(Service):
    """Processes the messages of one source, each exactly once in effect.

    ``stop`` finishes the transactions in progress and hands back to the source what was not begun. A pause of its
    subscriber (``txbox.operations.pauses``) does the same, and nothing is received until it ends.
    """

    _of = ""
    _on_loop = False

    @lists_options(WorkerOptions)
    def __init__(self, source: Source, **options: Unpack[WorkerOptions]) -> None:
        """Make a worker. It does not connect before ``start`` or ``run``.

        Args:
            source: where deliveries come from.
            options: those of ``txbox_workers.options.WorkerOptions``.

        Raises:
            TypeError: there is no such option.
            InvalidConfiguration: an option cannot work, or the source lacks a method.
        """
        of = self._of or type(self).__name__
        require_source(source, f"{of}.source")
        valid = valid_options(of, WorkerOptions, options)
        if valid.engine is not None and valid.engine.dialect.is_async and not self._on_loop:
            raise InvalidConfiguration(f"{of}.engine must be one of create_engine; an async one is for AsyncWorker")
        limit = valid.limit_seconds(source.visibility_seconds)
        super().__init__()
        self._stopping = GreenletEvent()
        self._activity = Activity(on_last=self._report_soon)
        self.subscriber_id = valid.subscriber_id
        self.source = source
        self._options = valid
        self._hooks += [log_event, self._count_retries, *valid.hooks]
        self._has_hooks = bool(valid.hooks)
        self._spans = ConsumerSpans(valid.tracing, source.name, valid.subscriber_id)
        self._processor = make_processor(
            valid,
            ProcessorContext(
                subscriber_id=valid.subscriber_id,
                source_name=source.name,
                hooks=self._hooks,
                spans=self._spans,
                wants_details=self._wants_details,
                stopping=self._activity.halted,
                limit=lambda: limit,
                settles=settles_in_transaction(source),
            ),
        )
        self._reporter: WorkerReporter | None = None
        self._heartbeat = VisibilityHeartbeat(source, self._heartbeat_failed)
        self._poller: Poller | None = None
        self._lock = threading.Lock()
        self._working = 0

    @property
    def counts(self) -> Mapping[Outcome, int]:
        """How many deliveries had which outcome since the worker was made."""
        return self._activity.counts

    @property
    def message_type(self) -> MessageType | None:
        """The type that bodies are read as for the handler; None if the handler takes the messages themselves."""
        return self._options.arguments.message_type

    def add_hook(self, hook: Hook) -> None:
        """Add a hook for every event, before the start; raises like ``Service.add_hook``."""
        super().add_hook(hook)
        self._has_hooks = True

    def _prepare(self) -> Mapping[str, Callable[[], object]]:
        try:
            self._with_database(self._processor.check)
        except DatabaseUnavailable as error:
            raise TxboxError(f"the database cannot be used: {error}") from error
        self.source.open()
        self._activity.begin()
        self._poller = self._make_poller()
        self._start_reporter()
        self._heartbeat.start()
        works = self._poller.threads()
        self._working = len(works)
        return {f"txbox-{self.subscriber_id}-{name}": self._until_stop(work) for name, work in works.items()}

    def _with_database(self, work: Callable[[], T]) -> T:
        """Call what uses the engine, from a thread other than an event loop's."""
        return work()

    def _make_poller(self) -> Poller:
        if not self._options.prefetch:
            return SequentialPoller(self._polling_context(), self._options.threads)
        return self._prefetching_poller(BatchThreads(self._options.threads))

    def _prefetching_poller(self, consumer: BatchConsumer) -> Poller:
        options = self._options
        return PrefetchingPoller(
            self._polling_context(),
            consumer,
            prefetch=options.prefetch,
            batch_size=options.batch_size,
            gather_seconds=options.gather_seconds,
        )

    def _polling_context(self) -> PollingContext:
        return PollingContext(
            subscriber_id=self.subscriber_id,
            source=self.source,
            processor=self._processor,
            heartbeat=self._heartbeat,
            spans=self._spans,
            activity=self._activity,
            stopping=self._stopping,
            emit=self._emit,
            wants_details=self._wants_details,
            give_way=self._give_way,
        )

    def _call_off(self) -> None:
        super()._call_off()
        self._activity.halt()
        if self._poller is not None:
            self._poller.halt()

    def _stopped(self, finished: bool) -> None:
        self._emit(Stopped, drained=finished)

    # --- reports and pauses -------------------------------------------------------------------------------------------

    def _start_reporter(self) -> None:
        place = self._options.report_place
        if place is None:
            return
        self._reporter = WorkerReporter(
            place,
            subscriber_id=self.subscriber_id,
            source=self.source.name,
            source_retention_seconds=getattr(self.source, "retention_seconds", None),
            figures=self._figures,
            on_answer=self._heed,
            on_outage=self._report_lost,
            call=self._with_database,
        )
        try:
            self._reporter.start()
        except BaseException:
            with source_errors_logged(self.subscriber_id, "close its source"):
                self.source.close()
            raise

    def _figures(self) -> WorkerFigures:
        figures, just_drained = self._activity.figures()
        if just_drained:
            self._emit(Drained)
        return figures

    def _heed(self, pause: Pause | None) -> None:
        """Pause or resume, as the database says."""
        if self._activity.report_restored():
            self._emit(DatabaseRestored)
        if not self._activity.heed(pause, self._stopping):
            return
        if pause is None:
            self._emit(Resumed)
        else:
            if self._poller is not None:
                self._poller.halt()
            self._emit(Paused, paused_by=pause.paused_by, note=pause.note)
        self._report_soon()

    def _report_soon(self) -> None:
        """Report the current state at once."""
        if self._reporter is not None:
            self._reporter.wake()

    def _report_lost(self, error: Exception) -> None:
        if not self._stopping.is_set() and self._activity.report_lost():
            self._emit(DatabaseLost, error=error, pause_seconds=REPORT_SECONDS)

    def _give_way(self) -> None:
        """Let a report have the connection that this thread has given back, between two transactions."""
        if self._reporter is not None:
            self._reporter.give_way()

    # --- threads -----------------------------------------------------------------------------------------------------

    def _until_stop(self, work: Callable[[], object]) -> Callable[[], None]:
        """Return the body of a thread. The last thread to end closes what they share, however they were stopped."""

        def run() -> None:
            work()
            with self._lock:
                self._working -= 1
                is_last = not self._working
            if is_last:
                self._heartbeat.stop()
                if self._reporter is not None:
                    self._reporter.stop()
                with source_errors_logged(self.subscriber_id, "close its source"):
                    self.source.close()

        return run

    # --- events ------------------------------------------------------------------------------------------------------

    def _count_retries(self, event: Event) -> None:
        if isinstance(event, Retried):
            self._activity.retried(event.sqlstate)

    def _emit(self, kind: Callable[..., Event], **attributes: object) -> None:
        emit(self._hooks, kind(self.subscriber_id, self.source.name, **attributes))

    def _wants_details(self) -> bool:
        """Whether a hook or the log takes the events of messages that succeed; each costs 2 to 3 us to make."""
        return self._has_hooks or _log.isEnabledFor(logging.DEBUG)

    def _heartbeat_failed(self, delivery: Delivery, why: str) -> None:
        self._emit(HeartbeatFailed, message_id=delivery.message.id, why=why)


_log = logging.getLogger("txbox.worker")
