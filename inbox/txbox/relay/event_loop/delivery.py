"""A delivery: a claim whose messages are being sent by a coroutine, or wait to be settled."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from txbox.relay.dispatch.dispatcher import DispatchResult
from txbox.relay.event_loop.claim_session import ClaimSession
from txbox.relay.pending import Claim
from txbox.relay.sender import ClaimResult
from txbox.relay.settlement import HeldKey, Row


@dataclass(slots=True, eq=False)
class Delivery:
    """A claim whose messages are being sent."""

    claim: Claim
    session: ClaimSession
    rows: Sequence[Row]
    held: set[HeldKey]
    result: ClaimResult
    size: int  # bytes of the bodies
    dispatched: DispatchResult = field(default_factory=DispatchResult)
    lost: bool = False  # others may send it: nothing more is sent, and nothing of it is settled
    settle_until: float = 0.0  # by ``time.monotonic``; then it is let go of, and sent again
    settle_at: float = 0.0  # not before, as it could not be settled
    failures: int = 0  # how often it could not be settled, though others could be
