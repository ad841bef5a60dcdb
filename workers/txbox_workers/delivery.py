"""A delivery and the source it comes from: what a worker needs a broker to do."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, cast

from txbox import InvalidConfiguration, Message, Outcome
from txbox.dead_letters.failures import History
from txbox.dead_letters.order import order_key
from txbox.postgres.round_trip import Step

__all__ = ["Delivery", "Settlement", "SettlesInTransaction", "Source"]


@dataclass(frozen=True, slots=True)
class Delivery:
    """One delivery of a message by a broker. The same message may be delivered many times.

    Attributes:
        message: what was delivered.
        receipt: identifies this delivery, and no other, to the broker.
        receive_count: how often the broker has delivered this message, including this time.
        group: deliveries of one group keep their order; None means no order.
        failure_group: if this delivery fails, later deliveries of this group wait; None means those of ``group``.
        body: as the broker delivered it, including envelopes.
        envelope: what the broker needs to send the message again.
        problem: why the message cannot be read; None if it can.
    """

    message: Message
    receipt: str
    receive_count: int = 1
    group: str | None = None
    failure_group: str | None = None
    body: bytes = b""
    envelope: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    problem: Exception | None = None

    @property
    def order_key(self) -> str | None:
        """The key whose order ``ordered=True`` keeps: the group, or else the key in the headers, or None."""
        return order_key(self.group, self.message.headers)


class Settlement(NamedTuple):
    """How to settle a delivery with the broker.

    Attributes:
        delivery: which one.
        outcome: decides between ack and hand back.
        error: what went wrong, if anything did.
        delay_seconds: when handed back: how long the broker should wait before it delivers again.
        counted: when parked: the attempts that counted, oldest first, as in ``DeadLetter.history``.
    """

    delivery: Delivery
    outcome: Outcome
    error: BaseException | None = None
    delay_seconds: float = 0.0
    counted: History = ()


class Source(Protocol):
    """A broker as a worker sees it. Several threads may call every method at once.

    It may have an attribute ``retention_seconds``, how long it keeps a message; its worker reports that.

    Each method raises ``txbox.BrokerError`` if the broker cannot be reached or refuses the whole call.
    """

    @property
    def name(self) -> str:
        """The source's name in messages and dead letters, such as the queue's URL."""

    @property
    def visibility_seconds(self) -> float | None:
        """How long a delivery belongs to its receiver before the broker delivers it again; None means for ever."""

    def open(self) -> None:
        """Raise unless the source exists and may be used. Called before a worker starts."""

    def receive(self) -> Sequence[Delivery]:
        """Return the next deliveries, in order. Wait for them for a bounded time, then return none.

        A stop does not interrupt the call, so it must end within that time even if the broker does not answer.
        """

    def ack(self, deliveries: Sequence[Delivery]) -> Collection[str]:
        """Tell the broker to forget deliveries.

        Returns:
            The receipts that the broker has confirmed. The others will be delivered again.
        """

    def hand_back(self, settlements: Sequence[Settlement]) -> None:
        """Tell the broker to deliver again, each after its ``delay_seconds``."""

    def extend_visibility(self, deliveries: Sequence[Delivery], seconds: float) -> Mapping[str, str]:
        """Make deliveries invisible for ``seconds`` from now.

        Returns:
            Why, for each receipt that was refused for good. Raise where another try may help.
        """

    def close(self) -> None:
        """Close the connections."""


class SettlesInTransaction(Protocol):
    """What a source has in addition if its messages are in the database of their effects.

    Its deliveries are settled in the transaction that processes them. So nothing comes again once that has committed.
    """

    def settling(self, deliveries: Sequence[Delivery]) -> Sequence[Step]:
        """Return the statements that settle deliveries. They are sent with BEGIN, behind the one that records.

        The last changes a row for each delivery. If it changes fewer, a message is not where it was: another has
        settled it, or somebody has taken it back, or it has moved. The transaction is rolled back, and the source looks
        again.
        """

    def settled(self, deliveries: Sequence[Delivery]) -> None:
        """Note that the transaction of these statements has committed. ``ack`` follows, and has nothing left to do."""


def settles_in_transaction(source: Source) -> SettlesInTransaction | None:
    """Return a source that settles in the transaction that processes; None if it is no such one."""
    return cast(SettlesInTransaction, source) if hasattr(source, "settling") and hasattr(source, "settled") else None


def require_source(source: object, of: str) -> None:
    """Raise ``InvalidConfiguration`` unless something is a source; ``of`` names the argument."""
    if isinstance(source, type):
        raise InvalidConfiguration(f"{of} must be a source, not the class {source.__name__}")
    missing = sorted(name for name in vars(Source) if name[0] != "_" and not hasattr(source, name))
    if missing:
        raise InvalidConfiguration(
            f"{of} must have all that a Source has; {type(source).__name__} lacks {', '.join(missing)}"
        )
