"""The worker: takes deliveries from a source, has them processed, and settles them with the source.

Several polling threads, if asked for, share one source and one heartbeat. Each repeats::

    receive → process (transactions) → ack what has committed, hand back what has not

The ack comes after the commit, so what dies in between leads to a redelivery, and the inbox rejects that.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Unpack

from txbox import BrokerError, Outcome, TxboxError
from txbox.backoff import Backoff
from txbox.error_logging import log_failure, text_of
from txbox.instrumentation import (
    BrokerLost,
    BrokerRestored,
    DatabaseLost,
    DatabaseRestored,
    Drained,
    Event,
    HeartbeatFailed,
    Hook,
    Paused,
    Received,
    Resumed,
    Retried,
    Settled,
    Stopped,
    emit,
)
from txbox.instrumentation.logs import log_event
from txbox.pauses import Pause
from txbox.postgres.sqlstates import DEADLOCK_DETECTED
from txbox.service import Service
from txbox_workers.consumer_spans import ConsumerSpans
from txbox_workers.delivery import Delivery, Settlement, Source, require_source
from txbox_workers.options import WorkerOptions, lists_options, valid_options
from txbox_workers.processing import DatabaseUnavailable, ProcessorContext, make_processor
from txbox_workers.reporter import REPORT_SECONDS, WorkerFigures, WorkerReporter
from txbox_workers.visibility_heartbeat import VisibilityHeartbeat

__all__ = ["Worker"]

OUTAGE_BACKOFF = Backoff(first_seconds=0.5, longest_seconds=30.0)
"""Between tries while the broker or the database cannot be reached."""

KEEP_SECONDS = 900.0
"""How long a delivery is kept whose attempt was counted, while it cannot be saved how that has ended. A worker that is
cut off for longer hands it back all the same, for other workers to process."""

ACK_AFTER_SECONDS = 1.0
"""A batch that is processed one by one is settled with the broker at least this often."""

RESUME_CHECK_SECONDS = 0.1
"""Between looks of a polling thread that is paused at whether it may go on."""


class Worker(Service):
    """Processes the messages of one source, each exactly once in effect.

    ``stop`` finishes the transactions under way, and hands back to the source what was not begun; so does a pause of
    its subscriber (``txbox.pauses``), after which nothing is received until it ends.
    """

    @lists_options(WorkerOptions)
    def __init__(self, source: Source, **options: Unpack[WorkerOptions]) -> None:
        """Put a worker together; nothing is connected before ``start`` or ``run``.

        Args:
            source: where deliveries come from.
            options: those of ``txbox_workers.options.WorkerOptions``.

        Raises:
            TypeError: there is no such option.
            InvalidConfiguration: an option cannot work, or the source lacks a method.
        """
        of = type(self).__name__
        require_source(source, f"{of}.source")
        valid = valid_options(of, WorkerOptions, options)
        limit = valid.limit_seconds(source.visibility_seconds)
        super().__init__()
        # Nothing more is to be begun: it stops, or is paused.
        self._halted = threading.Event()
        self._pause: Pause | None = None
        self._drained = False
        self._in_hand = 0
        self._last_batch_at: float | None = None
        self._oldest_sent_at: datetime | None = None
        self._retries: Counter[str] = Counter()
        self.subscriber_id = valid.subscriber_id
        self.source = source
        self._threads_wanted = valid.threads
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
                stopping=self._halted,
                limit=lambda: limit,
            ),
        )
        self._report_place = valid.report_place
        self._reporter: WorkerReporter | None = None
        self._heartbeat = VisibilityHeartbeat(source, self._heartbeat_failed)
        self._polling = 0
        self._awaiting_database = 0
        self._reported_lost = False
        self._lock = threading.Lock()
        self._counts: Counter[Outcome] = Counter()

    @property
    def counts(self) -> Mapping[Outcome, int]:
        """How many deliveries came to which outcome since the worker was made."""
        with self._lock:
            return dict(self._counts)

    def add_hook(self, hook: Hook) -> None:
        """Have one more hook get every event, before the start; raises as ``Service.add_hook``."""
        super().add_hook(hook)
        self._has_hooks = True

    def _prepare(self) -> Mapping[str, Callable[[], object]]:
        try:
            self._processor.check()
        except DatabaseUnavailable as error:
            raise TxboxError(f"the database cannot be used: {error}") from error
        self.source.open()
        self._halted.clear()
        self._pause, self._drained, self._in_hand = None, False, 0
        self._start_reporter()
        self._heartbeat.start()
        self._polling = self._threads_wanted
        numbers = range(1, self._threads_wanted + 1)
        return {f"txbox-{self.subscriber_id}-{number}": self._work for number in numbers}

    def _call_off(self) -> None:
        super()._call_off()
        with self._lock:
            self._halted.set()

    def _stopped(self, finished: bool) -> None:
        self._emit(Stopped, drained=finished)

    # --- its reports, and pauses --------------------------------------------------------------------------------------

    def _start_reporter(self) -> None:
        if self._report_place is None:
            return
        self._reporter = WorkerReporter(
            self._report_place,
            subscriber_id=self.subscriber_id,
            source=self.source.name,
            source_retention_seconds=getattr(self.source, "retention_seconds", None),
            figures=self._figures,
            on_answer=self._heed,
            on_outage=self._report_lost,
        )
        try:
            self._reporter.start()
        except BaseException:
            with self._errors_logged("close its source"):
                self.source.close()
            raise

    def _figures(self) -> WorkerFigures:
        with self._lock:
            drained = self._pause is not None and self._in_hand == 0
            just_drained, self._drained = drained and not self._drained, drained
            figures = WorkerFigures(
                state="drained" if drained else "working" if self._pause is None else "paused",
                outcomes={outcome.value: count for outcome, count in self._counts.items()},
                deadlocks=self._retries[DEADLOCK_DETECTED],
                retries=self._retries.total(),
                last_batch_at=self._last_batch_at,
                oldest_sent_at=self._oldest_sent_at,
            )
        if just_drained:
            self._emit(Drained)
        return figures

    def _heed(self, pause: Pause | None) -> None:
        """Pause, or go on, as the database says."""
        self._report_restored()
        with self._lock:
            before, self._pause = self._pause, pause
            if pause is not None:
                self._halted.set()
            elif not self._stopping.is_set():  # a stop sets the first one before it waits for the lock
                self._halted.clear()
        if (pause is None) == (before is None):
            return
        if pause is None:
            self._emit(Resumed)
        else:
            self._emit(Paused, paused_by=pause.paused_by, note=pause.note)
        if self._reporter is not None:  # what it is now is reported at once
            self._reporter.wake()

    def _report_lost(self, error: Exception) -> None:
        """Say that a report has met an outage; not where a polling thread has, which says so itself."""
        with self._lock:
            if self._reported_lost or self._awaiting_database or self._stopping.is_set():
                return
            self._reported_lost = True
        self._emit(DatabaseLost, error=error, pause_seconds=REPORT_SECONDS)

    def _report_restored(self) -> None:
        """Say that such an outage has ended; not while a polling thread waits for that, which says so itself."""
        with self._lock:
            was_lost, self._reported_lost = self._reported_lost, False
            if not was_lost or self._awaiting_database:
                return
        self._emit(DatabaseRestored)

    @contextmanager
    def _at_hand(self) -> Iterator[bool]:
        """While entered, what is received counts as in hand. Yields whether anything may be received."""
        with self._lock:
            # One step with the look at the pause: a worker that is drained must not be about to receive.
            if self._halted.is_set():
                may = False
            else:
                may, self._in_hand = True, self._in_hand + 1
        try:
            yield may
        finally:
            with self._lock:
                self._in_hand -= may
                last = may and self._pause is not None and self._in_hand == 0
            if last and self._reporter is not None:
                self._reporter.wake()

    def _give_way(self) -> None:
        """Between two transactions: let a report have the connection that this thread has given back."""
        if self._reporter is not None:
            self._reporter.give_way()

    # --- a polling thread --------------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Poll; the last thread to leave closes what they shared, in whatever way they were stopped."""
        self._poll()
        with self._lock:
            self._polling -= 1
            last = not self._polling
        if last:
            self._heartbeat.stop()
            if self._reporter is not None:
                self._reporter.stop()
            with self._errors_logged("close its source"):
                self.source.close()

    def _poll(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            try:
                self._give_way()
                with self._at_hand() as may_receive:
                    if may_receive:
                        failures = self._poll_once(failures)
                if not may_receive:
                    self._stopping.wait(RESUME_CHECK_SECONDS)
            except BaseException:  # noqa: BLE001 - a polling thread that ends silently is the worst outcome
                failures += 1
                log_failure("%s: polling raised an unexpected error, and continues", self.subscriber_id)
                self._stopping.wait(OUTAGE_BACKOFF.seconds(failures))

    def _poll_once(self, failures: int) -> int:
        """Receive, and process what there is; return how often in a row the broker has failed."""
        began_ns = time.time_ns()
        try:
            deliveries = self.source.receive()
        except BrokerError as error:
            failures += 1
            pause = OUTAGE_BACKOFF.seconds(failures)
            self._emit(BrokerLost, error=error, pause_seconds=pause)
            self._stopping.wait(pause)
            return failures
        if failures:
            self._emit(BrokerRestored)
        if deliveries:
            self._last_batch_at = time.monotonic()
            self._oldest_sent_at = _oldest_sent_at(deliveries)
            with self._spans.received(deliveries, began_ns):
                self._take(deliveries)
        return 0

    def _take(self, deliveries: Sequence[Delivery]) -> None:
        """Process one batch of deliveries to the end."""
        unsettled = {delivery.receipt: delivery for delivery in deliveries}
        waiting: list[Settlement] = []
        settled_at = time.monotonic()
        trouble: BaseException | None = None
        try:  # after any error in here, what is watched is handed back
            self._heartbeat.watch(deliveries, time.monotonic())
            if self._wants_details():
                self._emit(
                    Received,
                    message_ids=tuple(delivery.message.id for delivery in deliveries),
                    delivery_ids=tuple(delivery.receipt for delivery in deliveries),
                    oldest_seconds=_oldest_seconds(deliveries),
                )
            for settlements in self._processor.process(deliveries):
                waiting.extend(settlements)
                for settlement in settlements:
                    unsettled.pop(settlement.delivery.receipt, None)
                if unsettled and time.monotonic() - settled_at > ACK_AFTER_SECONDS:
                    self._settle(waiting)
                    waiting, settled_at = [], time.monotonic()
                self._give_way()
        except DatabaseUnavailable as error:
            trouble = error
        except BaseException as error:  # noqa: BLE001 - hand back, log it, and continue
            log_failure("%s: processing raised an unexpected error; its deliveries are handed back", self.subscriber_id)
            trouble = error
        kept = self._hand_back(
            [
                Settlement(delivery, Outcome.IN_FLIGHT, trouble, OUTAGE_BACKOFF.seconds(delivery.receive_count))
                for delivery in unsettled.values()
            ],
            after=waiting,
        )
        if trouble is not None:
            with self._lock:
                self._awaiting_database += 1
            try:
                self._await_database(trouble, kept)
            finally:
                with self._lock:
                    self._awaiting_database -= 1

    def _hand_back(self, settlements: Sequence[Settlement], after: Sequence[Settlement] = ()) -> list[Settlement]:
        """Hand back, but keep, and return, deliveries of which it is not saved how their attempts have ended."""
        kept: list[Settlement] = []
        free: list[Settlement] = []
        for settlement in settlements:
            (kept if self._processor.has_unsaved(settlement.delivery) else free).append(settlement)
        self._settle([*after, *free])
        return kept

    def _settle(self, settlements: Sequence[Settlement]) -> None:
        """Ack and hand back, as the outcomes say."""
        if not settlements:
            return
        self._heartbeat.forget(settlement.delivery for settlement in settlements)
        to_ack = [settlement.delivery for settlement in settlements if settlement.outcome.acked]
        to_hand_back = [settlement for settlement in settlements if not settlement.outcome.acked]
        acked: set[str] = set()
        # Nothing is lost: what was not acked or handed back comes again when its visibility ends.
        if to_ack:
            with self._errors_logged("ack a batch"), self._spans.settling("ack", to_ack):
                acked = set(self.source.ack(to_ack))
        if to_hand_back:
            handed_back = [settlement.delivery for settlement in to_hand_back]
            with self._errors_logged("hand back a batch"), self._spans.settling("hand_back", handed_back):
                self.source.hand_back(to_hand_back)
        with self._lock:
            self._counts.update(settlement.outcome for settlement in settlements)
        details = self._wants_details()
        for settlement in settlements:
            delivery = settlement.delivery
            if not details and settlement.outcome in _QUIET and delivery.receipt in acked:
                continue
            self._emit(
                Settled,
                message_id=delivery.message.id,
                delivery_id=delivery.receipt,
                outcome=settlement.outcome,
                acked=delivery.receipt in acked,
                attempts=delivery.receive_count,
                error=settlement.error,
                counted=settlement.counted,
            )

    @contextmanager
    def _errors_logged(self, what: str) -> Iterator[None]:
        try:
            yield
        except BrokerError as error:
            _log.warning("%s could not %s: %s", self.subscriber_id, what, text_of(error))
        except BaseException:  # noqa: BLE001 - a source is replaceable code, and must not end the thread
            log_failure("%s could not %s: an unexpected error", self.subscriber_id, what)

    def _await_database(self, trouble: BaseException, kept: Sequence[Settlement]) -> None:
        """Take nothing more from the broker until the database can be used again, and then hand back what was kept."""
        attempt, began = 1, time.monotonic()
        while not self._stopping.is_set():
            pause = OUTAGE_BACKOFF.seconds(attempt)
            self._emit(DatabaseLost, error=trouble, pause_seconds=pause)
            if self._stopping.wait(pause):
                break
            try:
                self._processor.check_recording()
            except Exception as error:  # noqa: BLE001 - whatever it is, it has not recovered
                trouble = error
                attempt += 1
                kept = self._hand_back(kept)
                if time.monotonic() - began > KEEP_SECONDS:
                    self._settle(kept)
                    kept = []
            else:
                self._settle(kept)
                self._emit(DatabaseRestored)
                return
        if kept:
            with suppress(Exception):
                self._processor.save_unsaved()
            # The rest comes again when its visibility ends.
            self._heartbeat.forget(each.delivery for each in self._hand_back(kept))

    # --- events ------------------------------------------------------------------------------------------------------

    def _count_retries(self, event: Event) -> None:
        if isinstance(event, Retried):
            with self._lock:
                self._retries[event.sqlstate] += 1

    def _emit(self, kind: Callable[..., Event], **attributes: object) -> None:
        emit(self._hooks, kind(self.subscriber_id, self.source.name, **attributes))

    def _wants_details(self) -> bool:
        """Whether a hook or the log takes the events of messages that succeed; each costs 2 to 3 us to make."""
        return self._has_hooks or _log.isEnabledFor(logging.DEBUG)

    def _heartbeat_failed(self, delivery: Delivery, why: str) -> None:
        self._emit(HeartbeatFailed, message_id=delivery.message.id, why=why)


def _oldest_seconds(deliveries: Sequence[Delivery]) -> float | None:
    """Return how long ago the oldest message was sent, as far as this machine's clock can tell; None: not known."""
    oldest = _oldest_sent_at(deliveries)
    return None if oldest is None else max(time.time() - oldest.timestamp(), 0.0)


def _oldest_sent_at(deliveries: Sequence[Delivery]) -> datetime | None:
    """Return when the oldest message was sent; None: not known."""
    return min((at for delivery in deliveries if (at := delivery.message.sent_at) is not None), default=None)


_QUIET = (Outcome.PROCESSED, Outcome.DUPLICATE)
"""What the log mentions at DEBUG only, once the broker has confirmed the ack."""


_log = logging.getLogger("txbox.worker")
