"""The handler of a Lambda function behind an SQS queue.

::

    event ─→ deliveries ─→ processed as a worker does, until time runs out ─→ {"batchItemFailures": [what comes again]}

Lambda is the worker here: it receives, deletes what is not in the answer, and delivers the rest again when the queue's
visibility timeout has passed. The answer is sent after the commits, so a crash in between leads to a redelivery, which
the inbox or the ledger rejects.

Nothing runs between invocations, while Lambda keeps the process frozen: everything for an event is done when its answer
is sent. One thread may exist, the one that has renewed leases. It has no leases then, wakes up with the process, finds
nothing to do, and ends.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Unpack

from txbox import Identify, InvalidConfiguration, Outcome, TxboxError, identify
from txbox.backoff import Backoff, retry
from txbox.instrumentation import Event, Hook, Received, Settled, emit
from txbox.instrumentation.logs import log_event
from txbox.leases.lease import elapsed
from txbox.messages import MessageType
from txbox.postgres.drivers.greenlets import sleep
from txbox_aws.envelopes import Envelope
from txbox_aws.lambda_.deadline import MARGIN_SECONDS, Deadline, seconds_left, timed, timed_batch
from txbox_aws.lambda_.event_source import Batch, batch_item_failures, batches
from txbox_workers.consumer_spans import ConsumerSpans
from txbox_workers.delivery import Settlement
from txbox_workers.options import ProcessingOptions, ValidOptions, lists_options, valid_options
from txbox_workers.processing import DatabaseUnavailable, Processor, ProcessorContext, make_processor

UNSAVED_SECONDS = 10.0
"""How long an invocation keeps trying to save how an attempt has ended, within its own time."""

UNSAVED_BACKOFF = Backoff(first_seconds=0.2, longest_seconds=2.0)
"""The delay between those tries."""

PartialBatchResponse = dict[str, list[dict[str, str]]]
"""Lambda's format: ``{"batchItemFailures": [{"itemIdentifier": …}]}``."""


@lists_options(ProcessingOptions)
def sqs_handler(
    *,
    identify: Identify = identify,
    envelope: Envelope | str = Envelope.AUTO,
    margin_seconds: float = MARGIN_SECONDS,
    **options: Unpack[ProcessingOptions],
) -> Callable[[Any, Any], PartialBatchResponse]:
    """Make the handler of a Lambda function that an SQS queue triggers.

    ::

        engine = create_engine(os.environ["DATABASE_URL"], pool_size=1, max_overflow=0)

        def on_purchase(session, message):
            purchase = message.json()
            session.execute(update(Account).where(...).values(...))

        handler = sqs_handler(inbox=Inbox("billing"), engine=engine, handler=on_purchase)

    Make it where the function's module is loaded: it does not connect before the first event, and the connections stay
    for later events. The trigger needs ``FunctionResponseTypes: [ReportBatchItemFailures]``: without it, Lambda does
    not read the answer, and **deletes messages that have failed**.

    A ledger in Postgres that shares the inbox's engine needs one more connection.

    Args:
        identify: chooses a message's id; the default order is that of ``txbox.identify``.
        envelope: how bodies are read: auto, raw, json, sns, eventbridge or cloudevents.
        margin_seconds: the time before the invocation's end in which no handler begins any more; at most half of its
            time.
        options: those of ``txbox_workers.options.ProcessingOptions``. A batch is an event; when time runs out, what was
            handled is committed.

    Returns:
        ``handle(event, context)``, which returns the batch item failures: everything to be delivered again. It raises
        ``TxboxError`` if the database or the ledger could not be used and no message has an outcome, and
        ``InvalidConfiguration`` if the event is not one of SQS.

    Raises:
        TypeError: there is no such option.
        InvalidConfiguration: an argument cannot work.
    """
    return make_function("sqs_handler", options, identify=identify, envelope=envelope, margin_seconds=margin_seconds)


def make_function(
    of: str, options: Mapping[str, Any], *, identify: Identify, envelope: Envelope | str, margin_seconds: float
) -> Callable[[Any, Any], PartialBatchResponse]:
    """Make the handler of a Lambda function; ``of`` is the name of the caller's function, for errors."""
    if not margin_seconds >= 0:
        raise InvalidConfiguration(f"{of}.margin_seconds must be at least 0, not {margin_seconds!r}")
    try:
        read_as = Envelope(envelope)
    except ValueError as error:
        raise InvalidConfiguration(f"{of}.envelope must be one of {', '.join(Envelope)}, not {envelope!r}") from error
    deadline = Deadline(margin_seconds)
    valid = valid_options(of, ProcessingOptions, options)
    if valid.handler is not None:
        valid = replace(valid, handler=timed(valid.handler, deadline))
    elif valid.batch_handler is not None:
        valid = replace(valid, batch_handler=timed_batch(valid.batch_handler, deadline))
    return _Function(valid, deadline, read_as, identify).handle


class _Function:
    """One Lambda function in one process. It handles one event at a time, or several in a thread each."""

    def __init__(self, options: ValidOptions, deadline: Deadline, envelope: Envelope, identify: Identify) -> None:
        self._options = options
        self._deadline = deadline
        self._envelope = envelope
        self._identify = identify
        self._hooks: tuple[Hook, ...] = (log_event, *options.hooks)
        self._has_hooks = bool(options.hooks)
        self._processors: dict[str, Processor] = {}

    @property
    def message_type(self) -> MessageType | None:
        """The type that bodies are read as for the handler; None if the handler takes the messages themselves."""
        return self._options.arguments.message_type

    def handle(self, event: Any, context: Any = None) -> PartialBatchResponse:
        self._deadline.begin(seconds_left(context))
        found = batches(event, envelope=self._envelope, identify=self._identify)
        settled: dict[str, Settlement] = {}
        trouble: Exception | None = None
        for batch in found:
            self._emit_received(batch)
            try:
                if trouble is None:
                    for settlement in self._outcomes(batch):
                        settled[settlement.delivery.receipt] = settlement
            except Exception as error:  # noqa: BLE001 - known outcomes are reported, whatever happens to the others
                trouble = error
                self._save_unsaved(self._processor(batch.source))
        failed = [item_id for batch in found for item_id in self._emit_settled(batch, settled, trouble)]
        if trouble is not None:
            self._raise_or_log(trouble, settled, len(failed))
        elif failed and self._deadline.has_refused:
            text = "%s ran out of time: %d of %d deliveries come again; make batches smaller, or the time-out longer"
            _log.warning(text, self._options.subscriber_id, len(failed), sum(len(b.deliveries) for b in found))
        return batch_item_failures(failed)

    def _outcomes(self, batch: Batch) -> Iterator[Settlement]:
        """Process what a queue has delivered, and yield outcomes as soon as they stand.

        After a freeze, the first use of a connection often finds it dead: the server, or something in between, has
        closed it. That alone does not fail an event: if nothing has happened yet, it starts once more.
        """
        processor = self._processor(batch.source)
        begun = False
        try:
            for settlements in processor.process(batch.deliveries):
                begun = True
                yield from settlements
        except DatabaseUnavailable as error:
            if begun or not error.before_handler:
                raise
            _log.info("%s begins again with a new connection: %s", self._options.subscriber_id, error)
            for settlements in processor.process(batch.deliveries):
                yield from settlements

    def _processor(self, source: str) -> Processor:
        """Return the processor for a queue. A function has one queue, rarely a few."""
        processor = self._processors.get(source)
        if processor is None:
            processor = self._processors[source] = make_processor(
                self._options,
                ProcessorContext(
                    subscriber_id=self._options.subscriber_id,
                    source_name=source,
                    hooks=self._hooks,
                    spans=ConsumerSpans(self._options.tracing, source, self._options.subscriber_id),
                    wants_details=self._wants_details,
                    stopping=self._deadline,
                    cut_short=self._deadline,
                    ends_at=self._deadline.ends_at,
                    limit=self._deadline.seconds_left,
                ),
            )
        return processor

    def _save_unsaved(self, processor: Processor) -> None:
        """Save how attempts have ended, if that could not be done at once.

        This comes before the answer: after it, the messages go to others, and this sandbox may never be invoked again.
        What is still unsaved is saved in its next invocation.
        """
        began = elapsed()

        def wait(seconds: float) -> bool:
            margin = self._deadline.seconds_to_margin()
            left = UNSAVED_SECONDS - (elapsed() - began)
            left = left if margin is None else min(left, margin)
            sleep(max(min(seconds, left), 0.0))
            return left <= 0

        try:
            retry(processor.save_unsaved, again=_is_unavailable, backoff=UNSAVED_BACKOFF, wait=wait)
        except DatabaseUnavailable as error:
            text = "%s: how an attempt has ended could not be saved, and it counts until it is: %s"
            _log.warning(text, self._options.subscriber_id, error)

    def _raise_or_log(self, trouble: Exception, settled: Mapping[str, Settlement], failed: int) -> None:
        """Raise if nothing has an outcome: Lambda's metrics count that, and the whole event comes again."""
        who = self._options.subscriber_id
        database_failed = isinstance(trouble, DatabaseUnavailable)
        if settled:
            why = (
                "the database or the ledger could not be used any more" if database_failed else "of an unforeseen error"
            )
            _log.error("%s: %d deliveries come again, because %s", who, failed, why, exc_info=trouble)
        elif database_failed:
            raise TxboxError(
                f"{who}: the database or the ledger cannot be used; all {failed} messages of the event come again: "
                f"{trouble}"
            ) from trouble
        else:
            raise trouble

    # --- events ------------------------------------------------------------------------------------------------------

    def _emit_received(self, batch: Batch) -> None:
        if self._wants_details():
            message_ids = tuple(delivery.message.id for delivery in batch.deliveries)
            delivery_ids = tuple(delivery.receipt for delivery in batch.deliveries)
            self._emit(Received, batch, message_ids=message_ids, delivery_ids=delivery_ids)

    def _emit_settled(self, batch: Batch, settled: Mapping[str, Settlement], trouble: Exception | None) -> list[str]:
        """Emit the outcomes of a batch; return Lambda's names for the deliveries that must come again."""
        failed = []
        details = self._wants_details()
        for delivery in batch.deliveries:
            settlement = settled.get(delivery.receipt) or Settlement(delivery, Outcome.IN_FLIGHT, trouble)
            if not settlement.outcome.acked:
                failed.append(batch.item_ids[delivery.receipt])
            elif not details and settlement.outcome in _QUIET:
                continue
            self._emit(
                Settled,
                batch,
                message_id=delivery.message.id,
                delivery_id=delivery.receipt,
                outcome=settlement.outcome,
                acked=settlement.outcome.acked,  # by our answer: Lambda deletes it afterwards
                attempts=delivery.receive_count,
                error=settlement.error,
                counted=settlement.counted,
            )
        return failed

    def _emit(self, kind: Callable[..., Event], batch: Batch, **attributes: object) -> None:
        emit(self._hooks, kind(self._options.subscriber_id, batch.source, **attributes))

    def _wants_details(self) -> bool:
        """Whether a hook or the log takes the events of messages that succeed."""
        return self._has_hooks or _settled_log.isEnabledFor(logging.DEBUG)


def _is_unavailable(error: Exception, _run: int) -> bool:
    return isinstance(error, DatabaseUnavailable)


_QUIET = (Outcome.PROCESSED, Outcome.DUPLICATE)
"""What the log mentions only at DEBUG."""

_log = logging.getLogger("txbox.lambda")
_settled_log = logging.getLogger("txbox.worker")
"""Where ``log_event`` logs the outcomes of deliveries."""
