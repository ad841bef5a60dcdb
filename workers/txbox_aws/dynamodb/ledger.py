"""A ledger in DynamoDB: one item per message, and one conditional write per step.

Needs the extra ``aws``. ::

    create_lease_table("message_lease")          # once
    ledger = DynamoDBLedger("mailing", table="message_lease")

**Whose clock.** DynamoDB has no expression for the time, so an item says when its lease expires in the *store's* time,
as DynamoDB gives it in the ``Date`` header of every response (see ``txbox_aws.dynamodb.store_clock``). A client's wall
clock decides no lease, no fence and no time of removal. (AWS itself refuses signatures that are some minutes off; that
is an error with a remedy.) A new lease ends its seconds after what the time may be *at most*. It is taken over when the
time is at *least* that plus ``SKEW_SECONDS``, because DynamoDB's hosts need not all have the same time::

    asked for     ├──────── seconds ────────┤                      the owner itself counts on no more than this
    in the item   ├─── up to 1 s + round trip ──┤                  expires_at = latest() + seconds
    taken over                              ├── up to 3 s + round trips ──┤    expires_at <= earliest() - SKEW_SECONDS

So for others a lease lasts up to about 3 seconds longer than was asked for, and about 1 second longer where many calls
have narrowed the bounds; it is never shorter. This assumes that the hosts' clocks are within ``SKEW_SECONDS``, and that
nothing between here and DynamoDB invents a ``Date`` or caches responses.

A machine that was suspended, so that even its interval clock stopped, would write leases that are already over. The
response shows that, and the lease is written again before it is used. But the clock cannot measure how long a lease
still lasts that was acquired before the suspension.

**Lost answers.** boto3 repeats a call that was not answered, though DynamoDB may have carried it out. So each
acquisition leaves a mark of its own, and one that is refused checks whose mark is there::

    acquire, mark m1 ── carried out ── answer lost
    acquire, mark m1 again ── refused: in flight, by m1: that is us

For completions and releases, the fence is enough. A renewal that was delayed on its way must not undo a later one: the
item keeps when the owner asked, by the owner's interval clock, and accepts only later requests.

The item: ``message_id`` (hash key) and ``subscriber_id`` (range key); ``fence``, ``attempts``, ``failures``,
``unknown_before``; ``owner``; ``mark``; ``asked_at`` (microseconds of the owner's interval clock); ``expires_at``
(milliseconds since 1970; absent: no owner), ``completed_at`` (the same); ``result``; ``fingerprint``; and ``remove_at``
(seconds since 1970), after which DynamoDB removes the item. A new item's fence begins at the store's time in
milliseconds, so it is greater than the fence of an item that was removed. An item past its removal time still counts
while it exists.
"""

import math
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from txbox.errors import InvalidConfiguration, LeaseLost, LedgerError, ResultNotStored
from txbox.leases.lease import (
    LEASE_SECONDS,
    Acquisition,
    AttemptEnd,
    Lease,
    LeaseRecord,
    LeaseState,
    acquisition_from,
    elapsed,
    owner,
    valid_lease_seconds,
)
from txbox.messages.message import valid_message_id, valid_subscriber_id
from txbox_aws.dynamodb.items import LeaseItems
from txbox_aws.dynamodb.store_clock import SKEW_SECONDS
from txbox_aws.dynamodb.table import TABLE, create_lease_table

if TYPE_CHECKING:
    from types_boto3_dynamodb import DynamoDBClient

__all__ = ["MAX_RESULT_BYTES", "RETENTION_SECONDS", "TABLE", "DynamoDBLedger", "create_lease_table"]

RETENTION_SECONDS = 15 * 24 * 60 * 60.0
"""How long a message is remembered after its last step: a day longer than SQS can keep one."""

MAX_RESULT_BYTES = 400 * 1024 - 4096
"""What DynamoDB keeps in an item, minus the longest ids, an owner and the names of all attributes."""

WRITES = 3
"""How often a lease is written again if its end turns out to be computed wrongly."""


class DynamoDBLedger:
    """The leases of one subscriber's messages, in a DynamoDB table. Implements ``Ledger``."""

    def __init__(
        self,
        subscriber_id: str,
        *,
        table: str = TABLE,
        client: "DynamoDBClient | None" = None,
        retention_seconds: float = RETENTION_SECONDS,
    ) -> None:
        """Name the subscriber and the table; do not connect yet.

        Args:
            subscriber_id: the consumer's name; each subscriber processes a message once.
            table: the table's name; see ``create_lease_table``.
            client: boto3's client of DynamoDB; by default the first call makes one, see ``dynamodb_client``. A client
                of yours should wait for an answer for at most a sixth of the lease; boto3's default is 60 s.
            retention_seconds: how long after its last step a message is remembered and a duplicate detected; at least
                60. DynamoDB removes older items some time later.

        Raises:
            InvalidConfiguration: an argument cannot work.
        """
        self._subscriber_id = valid_subscriber_id(subscriber_id, "DynamoDBLedger.subscriber_id")
        if not table or not isinstance(table, str):
            raise InvalidConfiguration(f"DynamoDBLedger.table must be a table's name, not {table!r}")
        if not 60 <= retention_seconds <= _MAX_RETENTION_SECONDS:
            raise InvalidConfiguration(
                f"DynamoDBLedger.retention_seconds must be from 60 to {_MAX_RETENTION_SECONDS:.0f}, "
                f"not {retention_seconds!r}"
            )
        self._table = table
        self._retention_seconds = retention_seconds
        self._items = LeaseItems(table, self._subscriber_id, client)

    def __repr__(self) -> str:
        return f"DynamoDBLedger({self._subscriber_id!r}, table={self._table!r})"

    @property
    def subscriber_id(self) -> str:
        """The consumer's name."""
        return self._subscriber_id

    def close(self) -> None:
        """Close the connections of a client that was made here. The next call makes another one."""
        self._items.close()

    def check(self) -> None:
        """Raise unless DynamoDB answers and the table exists, has our keys, and may be read and written.

        Raises:
            LedgerError: this is not so; permanent, with the remedy, if trying again cannot help.
        """
        message_id = f"check {uuid.uuid4()}"
        self._items.get(message_id)
        # Either refused because there is no such item, or not allowed.
        self._items.update(message_id, "SET #owner = :owner", "attribute_exists(#fence)", {"owner": owner()}, elapsed())

    def acquire(
        self, message_id: str, *, lease_seconds: float = LEASE_SECONDS, fingerprint: bytes | None = None
    ) -> Acquisition:
        """Ask for the lease of a message; see ``Ledger``. One round trip, and one more for a ledger's first call."""
        valid_message_id(message_id)
        lease_seconds = valid_lease_seconds(lease_seconds)
        for _ in range(WRITES):
            with suppress(LeaseLost):  # it was already over, and another owner was faster
                return self._acquire(message_id, lease_seconds, fingerprint)
        return Acquisition(LeaseState.IN_FLIGHT)

    def renew(self, lease: Lease, *, lease_seconds: float | None = None) -> None:
        """Extend a lease from now on; see ``Ledger``. One round trip. Only the machine that acquired it may do so."""
        lease_seconds = valid_lease_seconds(lease.lease_seconds if lease_seconds is None else lease_seconds)
        for _ in range(WRITES):
            asked_at, ends = self._ends(lease.message_id, lease_seconds)
            response = self._items.update(
                lease.message_id,
                f"SET {_assigned(ends)}",
                "#fence = :fence AND attribute_exists(#expires_at) AND #asked_at < :asked_at",
                {**ends, "fence": lease.fence},
                asked_at,
            )
            if not response.accepted:
                item = response.item
                if not (item.get("fence") == lease.fence and "expires_at" in item):
                    raise lease.mark_lost()
                if item["asked_at"] > ends["asked_at"]:
                    return  # another thread has renewed it since: that renewal stands
            if response.clock_agreed:
                lease.mark_renewed(lease_seconds, asked_at)
                return
        raise LedgerError(
            "DynamoDB's clock and that of this machine contradict each other again and again: "
            "was the machine suspended, or do answers come from a cache?"
        )

    def complete(self, lease: Lease, result: bytes | None = None) -> None:
        """Record that the work is done, for good; see ``Ledger``. One round trip.

        Raises:
            LeaseLost: another owner has taken the lease over.
            ResultNotStored: the result is larger than ``MAX_RESULT_BYTES``; the message is completed without it.
        """
        if result is None or len(result) <= MAX_RESULT_BYTES:
            try:
                self._complete(lease, result)
                lease.mark_ended()
                return
            except LedgerError as error:
                if result is None or _ITEM_TOO_LARGE not in str(error):
                    raise
        self._complete(lease, None)
        lease.mark_ended()
        raise ResultNotStored(
            lease.subscriber_id,
            lease.message_id,
            f"an item of DynamoDB holds at most {MAX_RESULT_BYTES:,} bytes beside what it is for, "
            f"and it has {len(result):,}",
        )

    def release(self, lease: Lease, ended: AttemptEnd = AttemptEnd.FAILED, *, forget_attempts: bool = False) -> None:
        """Record that the attempt has completed nothing; see ``Ledger``. One round trip."""
        asked_at, _, remove_at = self._now(lease.message_id)
        values = {"fence": lease.fence, "remove_at": remove_at, "zero": 0}
        uncounted = int(ended is AttemptEnd.NOT_COUNTED)
        if forget_attempts:
            values["unknown_now"] = lease.unknown_attempts + uncounted + (ended is AttemptEnd.UNKNOWN)
            counts = "#attempts = :zero, #failures = :zero, #unknown_before = :unknown_now"
            condition = "attribute_not_exists(#completed_at)"
        else:
            values["unmade"] = uncounted + (ended is AttemptEnd.NOT_MADE)
            values["failed"] = int(ended is AttemptEnd.FAILED)
            values["uncounted"] = uncounted
            counts = (
                "#attempts = #attempts - :unmade, #failures = #failures + :failed, "
                "#unknown_before = if_not_exists(#unknown_before, :zero) + :uncounted"
            )
            condition = "attribute_exists(#expires_at)"
        response = self._items.update(
            lease.message_id,
            f"SET #remove_at = :remove_at, {counts} REMOVE #expires_at",
            f"#fence = :fence AND {condition}",
            values,
            asked_at,
        )
        # If the lease is the newest and has no owner, it was released before, perhaps by a call whose answer was lost.
        if not response.accepted and (response.item.get("fence") != lease.fence or "completed_at" in response.item):
            raise lease.mark_lost()
        lease.mark_ended()

    def _acquire(self, message_id: str, lease_seconds: float, fingerprint: bytes | None) -> Acquisition:
        """Ask for a lease once.

        Raises:
            LeaseLost: its end was computed wrongly, and it was over before it could be written again.
        """
        if not self._items.clock.is_precise(elapsed()):
            # First find out the time. The item that comes with it may already answer the request.
            item = self._items.get(message_id)
            earliest = self._items.clock.earliest(elapsed())
            if (acquisition := self._refused(item, earliest, message_id, fingerprint)) is not None:
                return acquisition

        asked_at, ends = self._ends(message_id, lease_seconds)
        earliest = self._items.clock.earliest(asked_at)
        mark = uuid.uuid4().hex
        values: dict[str, Any] = {
            **ends,
            "owner": owner(),
            "mark": mark,
            "floor": _milliseconds(earliest),
            "over": _milliseconds(earliest - SKEW_SECONDS),
            "zero": 0,
            "one": 1,
        }
        # The condition is evaluated and the item written in one step. So of two that find an expired lease, the second
        # finds the first one's:
        #
        #   A  UpdateItem: expired: takes it
        #   B     UpdateItem: waits for the item ─┘ expires_at is A's, later than :over: refused
        # A call that arrives twice does not take its lease again, even if that was released or expired meanwhile.
        condition = (
            "attribute_not_exists(#completed_at) AND (attribute_not_exists(#expires_at) OR #expires_at <= :over) "
            "AND (attribute_not_exists(#mark) OR #mark <> :mark)"
        )
        change = (
            f"SET {_assigned(ends)}, #owner = :owner, #mark = :mark, #fence = if_not_exists(#fence, :floor) + :one, "
            "#attempts = if_not_exists(#attempts, :zero) + :one, #failures = if_not_exists(#failures, :zero)"
        )
        if fingerprint is not None:
            values["fingerprint"] = fingerprint
            condition += " AND (attribute_not_exists(#fingerprint) OR #fingerprint = :fingerprint)"
            change += ", #fingerprint = if_not_exists(#fingerprint, :fingerprint)"
        response = self._items.update(message_id, change, condition, values, asked_at, returned="ALL_NEW")
        item = response.item
        if response.accepted and item.get("mark") != mark:
            raise LedgerError(
                "DynamoDB's answer belongs to another question: was a client used by two processes, as after a fork?"
            )
        if response.accepted or (item.get("mark") == mark and "expires_at" in item):
            lease = Lease(
                self._subscriber_id,
                message_id,
                fence=item["fence"],
                attempt=item["attempts"],
                unknown_attempts=item["attempts"] - 1 - item["failures"] + item.get("unknown_before", 0),
                lease_seconds=lease_seconds,
                asked_at=asked_at,
            )
            if not response.clock_agreed:
                self.renew(lease)
            return Acquisition(LeaseState.ACQUIRED, lease)
        # With the same reading as the condition, so that what was refused is never free here.
        acquisition = self._refused(item, earliest, message_id, fingerprint)
        if acquisition is None:
            raise LedgerError(f"DynamoDB refused a lease of {message_id} that is free: {sorted(item)}")
        return acquisition

    def _refused(
        self, item: Mapping[str, Any], earliest: float, message_id: str, fingerprint: bytes | None
    ) -> Acquisition | None:
        """Return what an item means for a request that was refused the lease; see ``acquisition_from``."""
        expires_at = item.get("expires_at")
        record = LeaseRecord(
            completed="completed_at" in item,
            seconds_left=None if expires_at is None else (expires_at - _milliseconds(earliest - SKEW_SECONDS)) / 1000,
            result=item.get("result"),
            fingerprint=item.get("fingerprint"),
        )
        return acquisition_from(record, self._subscriber_id, message_id, fingerprint)

    def _complete(self, lease: Lease, result: bytes | None) -> None:
        asked_at, now, remove_at = self._now(lease.message_id)
        values: dict[str, Any] = {"fence": lease.fence, "completed_at": _milliseconds(now), "remove_at": remove_at}
        change = "SET #completed_at = :completed_at, #remove_at = :remove_at"
        if result is not None:
            values["result"] = result
            change += ", #result = :result"
        response = self._items.update(
            lease.message_id,
            f"{change} REMOVE #expires_at",
            "#fence = :fence AND attribute_exists(#expires_at)",
            values,
            asked_at,
        )
        # If the same lease completed it, that was an earlier call, or this one, whose answer was lost.
        if not response.accepted and (response.item.get("fence") != lease.fence or "completed_at" not in response.item):
            raise lease.mark_lost()

    def _ends(self, message_id: str, seconds: float) -> tuple[float, dict[str, Any]]:
        """Return a reading of the interval clock, and an item's values for a lease requested at that reading."""
        asked_at, now, remove_at = self._now(message_id, seconds)
        return asked_at, {
            "expires_at": math.ceil((now + seconds) * 1000),
            "asked_at": int(asked_at * 1_000_000),
            "remove_at": remove_at,
        }

    def _now(self, message_id: str, seconds: float = 0.0) -> tuple[float, float, int]:
        """Return a reading of the interval clock, the store's latest possible time then, and when to remove an item."""
        if not self._items.clock.is_precise(elapsed()):
            self._items.get(message_id)
        at = elapsed()
        now = self._items.clock.latest(at)
        return at, now, math.ceil(now + seconds + self._retention_seconds)


def _milliseconds(seconds: float) -> int:
    return math.floor(seconds * 1000)


def _assigned(values: Mapping[str, Any]) -> str:
    return ", ".join(f"#{name} = :{name}" for name in values)


_ITEM_TOO_LARGE = "exceeded the maximum allowed size"

_MAX_RETENTION_SECONDS = 100 * 365 * 24 * 60 * 60.0
