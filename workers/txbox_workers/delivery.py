"""A delivery, and the source it comes from: what a worker needs a broker to be able to do."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from txbox import InvalidConfiguration, Message, Outcome
from txbox.dead_letters.failures import History
from txbox.dead_letters.order import order_key

__all__ = ["Delivery", "Settlement", "Source"]


@dataclass(frozen=True, slots=True)
class Delivery:
    """One handing-over of a message by a broker. The same message may be delivered many times.

    Attributes:
        message: what was delivered.
        receipt: names this delivery to the broker, and no other delivery.
        receive_count: how often the broker has delivered this message, this time included.
        group: deliveries of one group keep their order; None where there is no order.
        failure_group: if it fails, the deliveries of this group behind it wait; None: those of ``group``.
        body: as the broker delivered it, envelopes and all.
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
        """The group, or else the key that its headers name: whose order is kept with ``ordered=True``; None: none."""
        return order_key(self.group, self.message.headers)


class Settlement(NamedTuple):
    """How a delivery is to be settled with the broker.

    Attributes:
        delivery: which one.
        outcome: what became of it; decides between ack and hand back.
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
    """A broker, seen from a worker. Every method may be called by several threads at once.

    It may have an attribute ``retention_seconds``, which its worker reports: how long it keeps a message.

    Each method raises ``txbox.BrokerError`` when the broker cannot be reached or refuses the call as a whole.
    """

    @property
    def name(self) -> str:
        """What messages and dead letters name as their source, such as the queue's URL."""

    @property
    def visibility_seconds(self) -> float | None:
        """How long a delivery belongs to its receiver before the broker delivers it again; None: for ever."""

    def open(self) -> None:
        """See that the source exists and may be used, before a worker starts."""

    def receive(self) -> Sequence[Delivery]:
        """Return the next deliveries, in order; wait for them a bounded time, and return none after it.

        A stop does not interrupt it, so it ends within that time also where the broker does not answer.
        """

    def ack(self, deliveries: Sequence[Delivery]) -> Collection[str]:
        """Have the broker forget deliveries.

        Returns:
            The receipts that it has confirmed. The others will be delivered again.
        """

    def hand_back(self, settlements: Sequence[Settlement]) -> None:
        """Have the broker deliver again, each after its ``delay_seconds``."""

    def extend_visibility(self, deliveries: Sequence[Delivery], seconds: float) -> Mapping[str, str]:
        """Extend the visibility of deliveries: so many seconds from now on.

        Returns:
            For each receipt that was refused finally: why. Where another try may help, raise.
        """

    def close(self) -> None:
        """Give back connections."""


def require_source(source: object, of: str) -> None:
    """Raise ``InvalidConfiguration`` if something is not a source; ``of`` names the argument."""
    if isinstance(source, type):
        raise InvalidConfiguration(f"{of} must be a source, not the class {source.__name__}")
    missing = sorted(name for name in vars(Source) if name[0] != "_" and not hasattr(source, name))
    if missing:
        raise InvalidConfiguration(
            f"{of} must have all that a Source has; {type(source).__name__} lacks {', '.join(missing)}"
        )
