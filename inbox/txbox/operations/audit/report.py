"""The report of an audit. Pure: no I/O."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any


class FindingKind(StrEnum):
    """What is wrong with a message; ``SENT_AGAIN`` and ``PROCESSED_SINCE`` are not faults."""

    MISSING = "missing"
    """It was sent, and the inbox knows nothing of it."""
    OVERDUE = "overdue"
    """It failed, or a lease of it ran out, and it has not come again in time: it is lost, or waits in a backlog."""
    FOREIGN = "foreign"
    """It is in the inbox, and this outbox has not sent it."""
    DOUBLED = "doubled"
    """The inbox has it more than once, so it may have been processed more than once."""
    UNPARKED = "unparked"
    """The inbox says that it is parked, but there is no such dead letter, or it was redriven."""
    UNRECORDED = "unrecorded"
    """A dead letter of it waits, but the inbox does not say that it is parked."""
    SENT_AGAIN = "sent_again"
    """It was sent under one id more than once: by a replay, or by its producer. The inbox applies it once."""
    PROCESSED_SINCE = "processed_since"
    """A dead letter of it waits, and it is processed: there is nothing to redrive."""


FAULTS = tuple(kind.value for kind in FindingKind if kind not in (FindingKind.SENT_AGAIN, FindingKind.PROCESSED_SINCE))
"""The kinds that a balanced audit has none of."""

FAULTS_OF_SENT = tuple(kind.value for kind in (FindingKind.MISSING, FindingKind.OVERDUE, FindingKind.FOREIGN))
"""The faults that only a comparison with what was sent can show."""

COUNTS: Mapping[str, str] = {
    "sent": "ids that were sent, and are kept",
    "processed": "of them",
    "parked": "of them, wait as dead letters",
    "expired": "of them, came too late to be run, and wait as dead letters",
    "discarded": "of them, given up by a person",
    "retrying": "of them, failed lately and will be tried again, or are worked on",
    "in_flight": "of them, sent too lately to be missed",
    "forgotten": "sent, but so long ago that the inbox may have forgotten them: not judged",
    "not_kept": "in the inbox, but older than what the outbox keeps: not judged",
    "recent": "in the inbox, too lately to be judged",
    "unsettled": "in the inbox, and still in the outbox: they will be sent again",
    "elsewhere": "in the inbox, and sent to another destination",
    "others": "in the inbox, and not sent by this outbox, beside which there are others",
    "waiting": "in the outbox, to be sent (up to 100,000 are counted)",
    "undelivered": "dead letters of the relay: never accepted by the broker",
    "missing": "sent, and not in the inbox: LOST, or in a backlog older than --in-flight",
    "overdue": "sent, failed or were worked on, and did not come again: LOST, or in a backlog older than --in-flight",
    "foreign": "in the inbox, and never sent by this outbox",
    "doubled": "in the inbox more than once",
    "unparked": "parked by the inbox, without a dead letter that waits",
    "unrecorded": "dead letters that wait, not parked by the inbox",
    "sent_again": "sends of an id that was sent before; the inbox applies it once",
    "processed_since": "dead letters that wait although their message is processed; discard them",
}
"""What is counted, in the order in which it is shown, and what it means."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One message by name.

    Attributes:
        kind: what is wrong.
        message_id: the message.
        at: when it was sent, or processed if it was not sent; None if that is not known.
    """

    kind: FindingKind
    message_id: str
    at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Stretch:
    """A range of message ids in which something is wrong. If ids begin with their time, it is a stretch of time.

    Attributes:
        after: the id before its first one.
        last: its last id, or where the next stretch begins.
        since, until: the times in its first and last ids, if they are UUIDs of version 7; otherwise None.
        sent: ids that were sent and can be judged.
        recorded: ids in the inbox that can be judged.
        faults: how many were found, by kind.
    """

    after: str
    last: str
    since: datetime | None
    until: datetime | None
    sent: int
    recorded: int
    faults: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What an audit of one subscriber has found.

    Attributes:
        subscriber_id: whose inbox.
        destinations: where the messages were sent; empty if only the inbox was audited.
        counts: how many messages, under every name of ``COUNTS``.
        findings: the first faulty messages, by name; ``counts`` counts all.
        differing: the first stretches in which something is wrong.
        stretches: how many were compared.
        kept_since: when the first kept message was sent; None if only the inbox was audited.
        horizon: of the subscriber; None if it forgets nothing.
        in_flight_seconds: messages sent or processed within this time before the start are not judged.
        seconds: how long the audit took.
        not_compared: destinations of which nothing was compared, because nothing was sent there as far back as can be
            judged. The name may be wrong.
        compared_since: as far back as can be judged; None if only the inbox was audited.
    """

    subscriber_id: str
    destinations: tuple[str, ...]
    counts: Mapping[str, int]
    findings: tuple[Finding, ...] = ()
    differing: tuple[Stretch, ...] = ()
    stretches: int = 0
    kept_since: datetime | None = None
    horizon: datetime | None = None
    in_flight_seconds: float = 0.0
    seconds: float = field(default=0.0, compare=False)
    not_compared: tuple[str, ...] = ()
    compared_since: datetime | None = None

    @property
    def faults(self) -> int:
        """How many faults there are, of any kind."""
        return sum(self.counts[kind] for kind in FAULTS)

    @property
    def balanced(self) -> bool:
        """Whether nothing is wrong, as far as can be judged, and something was compared for each destination."""
        return self.faults == 0 and not self.not_compared

    @property
    def not_judged(self) -> tuple[str, ...]:
        """The kinds of fault that this audit cannot find: without destinations, nothing that was sent is compared."""
        return () if self.destinations else FAULTS_OF_SENT

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {"balanced": self.balanced, **asdict(self), "not_judged": self.not_judged}


def time_of(message_id: str) -> datetime | None:
    """Return the time with which a UUID of version 7 begins, in UTC; None for any other id."""
    if _UUID7.fullmatch(message_id) is None:
        return None
    milliseconds = int(message_id[:8] + message_id[9:13], 16)
    try:
        return _EPOCH + timedelta(milliseconds=milliseconds)
    except OverflowError:
        return None


def id_from(moment: datetime) -> str:
    """Return a text that sorts before every UUID of version 7 made at ``moment`` or later."""
    text = f"{max(0, (moment - _EPOCH) // timedelta(milliseconds=1)):012x}"
    return f"{text[:8]}-{text[8:]}-"


_UUID7 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", re.IGNORECASE)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
