"""What a run of the demo is to do, and how far it is."""

from dataclasses import dataclass, field

from txbox_demo.crew import BILLING, NOTIFICATION, RELAY, SHOP, Team
from txbox_demo.standing import Standing

__all__ = ["Plan", "Progress"]

SHOPS = 2
RELAYS = 2

LOST_ANSWERS_AND_KILLS = 1.3
"""About how often a message is sent."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do.

    Attributes:
        purchases: how many of the file's.
        workers: processes at a time, of billing and of notification each.
        kills: how many processes to kill, of all roles.
        seed: of all random choices.
        database_url: a Postgres to use; None starts an embedded one.
        own_broker: start a local SQS; otherwise boto3's own settings lead to one.
        keep: leave schema and queues behind.
        last_act: have Spark load the whole file beside the workers, at the end.
    """

    purchases: int
    workers: int
    kills: int
    seed: int
    database_url: str | None = None
    own_broker: bool = True
    keep: bool = False
    last_act: bool = False

    def teams(self) -> list[Team]:
        """Return the processes of the chain: a third of the kills each for billing and for shop and relay together."""
        billing, notification = -(-self.kills // 3), self.kills // 4
        relay = (self.kills - billing - notification + 1) * 3 // 5
        shop = self.kills - billing - notification - relay
        each = round(self.purchases * LOST_ANSWERS_AND_KILLS)
        return [
            Team(SHOP, SHOPS, shop, self.purchases),
            Team(RELAY, RELAYS, relay, 2 * each),
            Team(BILLING, self.workers, billing, each),
            Team(NOTIFICATION, self.workers, notification, each),
        ]


@dataclass(slots=True)
class Progress:
    """How far a run is; changed as it goes."""

    stage: str = "starting"
    standing: Standing = field(default_factory=Standing)
    kills: int = 0
