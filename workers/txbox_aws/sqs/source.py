"""An SQS queue as a source for a worker.

SQS's rules shape it: ten messages per call; a delivery is ours for at most 12 hours, including extensions; and batch
calls answer per entry, so an entry can fail although the call succeeded.
"""

import math
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from txbox import BrokerError, Identify, InvalidConfiguration, identify
from txbox.backoff import Backoff
from txbox_aws.clients import SQS, WAIT_SECONDS, sqs_client, translated
from txbox_aws.envelopes import Envelope, open_envelope
from txbox_aws.sqs.queues import MAX_BATCH, MAX_VISIBILITY_SECONDS, MAX_WAIT_SECONDS
from txbox_workers.delivery import Delivery, Settlement

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

VISIBILITY_SECONDS = 30
"""How long a delivery is ours before the heartbeat has to extend it."""

ENTRY_RUNS = 3
"""How often an entry of a batch call is tried if it failed through the broker's fault."""

ENTRY_BACKOFF = Backoff(first_seconds=0.1, longest_seconds=1.0)
"""The delay between those tries."""


class _Unconfirmed(NamedTuple):
    """Why SQS did not confirm an entry of a batch call, and whether that is final."""

    why: str
    final: bool


class SqsSource:
    """An SQS queue, standard or FIFO, as a source for a worker."""

    def __init__(
        self,
        queue_url: str,
        *,
        client: "SQSClient | None" = None,
        identify: Identify = identify,
        envelope: Envelope | str = Envelope.AUTO,
        batch_size: int = MAX_BATCH,
        wait_seconds: int = WAIT_SECONDS,
        visibility_seconds: int = VISIBILITY_SECONDS,
        connections: int = 10,
    ) -> None:
        """Name the queue; do not call SQS yet. The arguments are those of ``SqsWorker``."""
        if not re.match(r"https?://[^/]+/.+", queue_url or ""):
            raise InvalidConfiguration(f"SqsWorker.queue_url must be the URL of a queue, not {queue_url!r}")
        for name, value, least, most in (
            ("batch_size", batch_size, 1, MAX_BATCH),
            ("wait_seconds", wait_seconds, 0, MAX_WAIT_SECONDS),
            ("visibility_seconds", visibility_seconds, 1, MAX_VISIBILITY_SECONDS),
        ):
            if not (isinstance(value, int) and least <= value <= most):
                raise InvalidConfiguration(
                    f"SqsWorker.{name} must be a whole number from {least} to {most}, not {value!r}"
                )
        try:
            self._envelope = Envelope(envelope)
        except ValueError as error:
            raise InvalidConfiguration(
                f"SqsWorker.envelope must be one of {', '.join(Envelope)}, not {envelope!r}"
            ) from error
        self._queue_url = queue_url
        self._identify = identify
        self._batch_size = batch_size
        self._wait_seconds = wait_seconds
        self._visibility_seconds = visibility_seconds
        self._connections = connections
        self._given_client = client
        self._made_client: SQSClient | None = None
        self._received_at: dict[str, float] = {}
        self.retention_seconds: float | None = None
        """How long the queue keeps a message; None before ``open``."""

    @property
    def name(self) -> str:
        """The queue's URL."""
        return self._queue_url

    @property
    def visibility_seconds(self) -> float | None:
        """How long a delivery is ours before SQS delivers it again."""
        return self._visibility_seconds

    @property
    def _client(self) -> "SQSClient":
        if self._given_client is not None:
            return self._given_client
        if self._made_client is None:
            self._made_client = sqs_client(
                self._queue_url,
                wait_seconds=self._wait_seconds,
                connections=self._connections,
                checks_parameters=False,  # they are checked above, or made here
            )
        return self._made_client

    def open(self) -> None:
        """Raise unless the queue exists and answers; read how long it keeps messages."""
        with translated(SQS, self._queue_url):
            answer = self._client.get_queue_attributes(
                QueueUrl=self._queue_url, AttributeNames=["QueueArn", "MessageRetentionPeriod"]
            )
        retention = answer.get("Attributes", {}).get("MessageRetentionPeriod")
        self.retention_seconds = None if retention is None else float(retention)

    def receive(self) -> Sequence[Delivery]:
        """Return up to ``batch_size`` deliveries, in SQS's order."""
        with translated(SQS, self._queue_url):
            answer = self._client.receive_message(
                QueueUrl=self._queue_url,
                MaxNumberOfMessages=self._batch_size,
                WaitTimeSeconds=self._wait_seconds,
                VisibilityTimeout=self._visibility_seconds,
                MessageAttributeNames=["All"],
                MessageSystemAttributeNames=["All"],
            )
        received_at = time.monotonic()
        deliveries = self._opened(answer.get("Messages", ()))
        for delivery in deliveries:
            self._received_at[delivery.receipt] = received_at
        return deliveries

    def _opened(self, records: Sequence[Mapping[str, Any]]) -> list[Delivery]:
        return [
            open_envelope(record, self._source_of(record), envelope=self._envelope, identify=self._identify)
            for record in records
        ]

    def _source_of(self, record: Mapping[str, Any]) -> str:  # noqa: ARG002 - for subclasses: dead-letter queues
        """Return the URL of the queue that a message was sent to."""
        return self._queue_url

    def ack(self, deliveries: Sequence[Delivery]) -> Collection[str]:
        """Delete messages, in batches. An entry that failed through the broker's fault is tried again."""
        try:
            unconfirmed = self._in_batches(
                deliveries,
                lambda entries: self._client.delete_message_batch(QueueUrl=self._queue_url, Entries=entries),  # type: ignore[arg-type]
                lambda delivery: {"ReceiptHandle": delivery.receipt},
            )
        finally:
            self._forget(deliveries)
        return [delivery.receipt for delivery in deliveries if delivery.receipt not in unconfirmed]

    def hand_back(self, settlements: Sequence[Settlement]) -> None:
        """Make messages visible again, each after its delay."""
        delays = {settlement.delivery.receipt: settlement.delay_seconds for settlement in settlements}
        deliveries = [settlement.delivery for settlement in settlements]
        try:
            self._change_visibility(deliveries, delays)
        finally:
            self._forget(deliveries)

    def extend_visibility(self, deliveries: Sequence[Delivery], seconds: float) -> Mapping[str, str]:
        """Extend the visibility of deliveries, as far as SQS's 12 hours allow."""
        now = time.monotonic()
        refused: dict[str, str] = {}
        extendable, delays = [], {}
        for delivery in deliveries:
            left = MAX_VISIBILITY_SECONDS - (now - self._received_at.get(delivery.receipt, now))
            if left < 1:
                refused[delivery.receipt] = "SQS's limit of 12 hours is reached"
            else:
                extendable.append(delivery)
                # Rounded down: SQS refuses an extension that is a second too long altogether.
                delays[delivery.receipt] = math.floor(min(seconds, left))
        unconfirmed = self._change_visibility(extendable, delays)
        refused |= {receipt: why for receipt, (why, final) in unconfirmed.items() if final}
        unknown = [why for why, final in unconfirmed.values() if not final]
        if unknown:
            # Not refused: time is left, and the next try may succeed.
            raise BrokerError(f"{len(unknown)} of {len(deliveries)} extensions were not confirmed: {unknown[0]}")
        return refused

    def close(self) -> None:
        """Close the connections, if the client was made here."""
        if self._made_client is not None:
            self._made_client.close()
            self._made_client = None

    def _change_visibility(
        self, deliveries: Sequence[Delivery], delays: Mapping[str, float]
    ) -> Mapping[str, _Unconfirmed]:
        def entry(delivery: Delivery) -> dict[str, Any]:
            seconds = min(max(math.ceil(delays[delivery.receipt]), 0), MAX_VISIBILITY_SECONDS)
            return {"ReceiptHandle": delivery.receipt, "VisibilityTimeout": seconds}

        return self._in_batches(
            deliveries,
            lambda entries: self._client.change_message_visibility_batch(QueueUrl=self._queue_url, Entries=entries),  # type: ignore[arg-type]
            entry,
        )

    def _in_batches(
        self,
        deliveries: Sequence[Delivery],
        call: Callable[[list[dict[str, Any]]], Any],
        entry: Callable[[Delivery], dict[str, Any]],
    ) -> Mapping[str, _Unconfirmed]:
        """Call for ten deliveries at a time, and reconcile the answer entry by entry.

        An entry that is in neither list of the answer counts as failed: only what SQS confirms counts as done.

        Returns:
            For each receipt that is still not confirmed at the end: why, and whether that is final.
        """
        unconfirmed = {delivery.receipt: _Unconfirmed("", False) for delivery in deliveries}
        for start in range(0, len(deliveries), MAX_BATCH):
            pending = dict(enumerate(deliveries[start : start + MAX_BATCH]))
            for run in range(1, ENTRY_RUNS + 1):
                try:
                    with translated(SQS, self._queue_url):
                        answer = call([{"Id": str(number), **entry(delivery)} for number, delivery in pending.items()])
                except BrokerError as error:
                    if len(unconfirmed) == len(deliveries):
                        raise
                    # Part of it stands, so raising would be wrong.
                    return {receipt: _Unconfirmed(str(error), False) for receipt in unconfirmed}
                for done in answer.get("Successful", ()):
                    if delivery := pending.pop(int(done["Id"]), None):
                        unconfirmed.pop(delivery.receipt, None)
                failures = {int(failed["Id"]): failed for failed in answer.get("Failed", ())}
                for number, delivery in list(pending.items()):
                    failed = failures.get(number, {})
                    why = f"{failed.get('Code', 'NoAnswer')}: {failed.get('Message', '')}".strip()
                    final = bool(failed.get("SenderFault"))
                    unconfirmed[delivery.receipt] = _Unconfirmed(why, final)
                    if final:
                        del pending[number]
                if not pending or run == ENTRY_RUNS:
                    break
                # Sleep, because nothing signals that the broker has recovered. For ten deliveries that is at most
                # 0.3 seconds in all (0.1, then 0.2). A stop does not cut it short: a worker that drains still needs
                # these acks.
                time.sleep(ENTRY_BACKOFF.seconds(run))
        return unconfirmed

    def _forget(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            self._received_at.pop(delivery.receipt, None)
