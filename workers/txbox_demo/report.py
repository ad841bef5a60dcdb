"""The report of a run: what the demo says of itself."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from txbox_demo.accounting import Comparison, Deliveries, Notices, Sends
from txbox_demo.last_act import LastAct
from txbox_demo.plan import Plan
from txbox_demo.relay_process import LOST_ANSWER_SHARE
from txbox_demo.standing import Standing
from txbox_demo.worker_process import LOST_ACK_SHARE

__all__ = ["Report", "Shop"]


@dataclass(frozen=True, slots=True)
class Shop:
    """What the shop has come to.

    Attributes:
        placed: orders that are there.
        rolled_back: orders that were written down and published, and rolled back on purpose.
        wrong: orders that differ from the file's, or are missing.
    """

    placed: int
    rolled_back: int
    wrong: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """What a run has come to.

    Attributes:
        plan: what was to be done.
        shop: the orders against the file.
        sends: what the relays have sent.
        deliveries: what became of the deliveries, by subscriber.
        kills: how many processes were killed, by role and moment.
        processes_started: of all roles.
        comparison: the accounts against the file.
        notices: the mails against the file.
        standing: what was left at the end.
        dead: dead letters, of workers and relays.
        seconds: from the first order to the last ack.
        schema, queue_urls: where it was.
        last_act: what Spark has come to; None if it was left out.
    """

    plan: Plan
    shop: Shop
    sends: Sends
    deliveries: Mapping[str, Deliveries]
    kills: Mapping[str, Mapping[str, int]]
    processes_started: int
    comparison: Comparison
    notices: Notices
    standing: Standing
    dead: int
    seconds: float
    schema: str
    queue_urls: tuple[str, ...]
    last_act: LastAct | None = None

    @property
    def adds_up(self) -> bool:
        """Whether every order, send and delivery is accounted for."""
        return not self.contradictions and all(each.adds_up for each in self.deliveries.values())

    @property
    def contradictions(self) -> tuple[str, ...]:
        """What cannot be, in words; empty if all is well."""
        found = [f"shop: {len(self.shop.wrong)} orders that are not the file's"] if self.shop.wrong else []
        found += [f"relay: {what}" for what in self.sends.contradictions]
        for subscriber, deliveries in self.deliveries.items():
            found += [f"{subscriber}: {what}" for what in deliveries.contradictions]
        found += [f"mails: {what}" for what in self.notices.contradictions]
        if self.standing.backlog:
            found.append(f"not at its end: {self.standing}")
        return tuple(found)

    @property
    def exact(self) -> bool:
        """Whether all of it adds up: each purchase billed once, to the cent, and mailed once wherever one can know."""
        well_ended = self.last_act is None or self.last_act.exact
        return self.comparison.exact and self.notices.exact and self.adds_up and well_ended

    @property
    def kills_total(self) -> int:
        """How many processes were killed, of all roles."""
        return sum(sum(moments.values()) for moments in self.kills.values())

    def duplicate_share(self, subscriber: str) -> float:
        """Duplicates that reached a subscriber's workers, as a share of the purchases."""
        return self.deliveries[subscriber].duplicates / self.plan.purchases

    def as_dict(self) -> dict[str, Any]:
        """Return all figures as plain values; no URL, because one may hold a password."""
        return {
            "exact": self.exact,
            "adds_up": self.adds_up,
            "contradictions": list(self.contradictions),
            "purchases": self.plan.purchases,
            "customers": self.comparison.customers,
            "orders": {
                "placed": self.shop.placed,
                "rolled_back": self.shop.rolled_back,
                "wrong": len(self.shop.wrong),
            },
            "sent": {
                "messages": self.sends.messages,
                "sends": self.sends.handed,
                "again": self.sends.again,
                "lost_answer_share": LOST_ANSWER_SHARE,
            },
            "lost_ack_share": LOST_ACK_SHARE,
            **{subscriber: self._delivered(subscriber) for subscriber in self.deliveries},
            "notifications": {
                "mails": self.notices.mails,
                "refused": self.notices.refused,
                "once": self.notices.once,
                "unsure": self.notices.unsure,
                "unsure_twice": self.notices.unsure_twice,
                "unsure_once": self.notices.unsure_once,
                "missing": list(self.notices.missing[:_NAMED]),
                "repeated": list(self.notices.repeated[:_NAMED]),
                "wrong": list(self.notices.wrong[:_NAMED]),
            },
            "backlog": {
                "outbox": self.standing.outbox,
                "purchases_queue": self.standing.purchases_queue,
                "notifications_queue": self.standing.notifications_queue,
            },
            "kills": {"total": self.kills_total, **{role: dict(moments) for role, moments in self.kills.items()}},
            "processes_started": self.processes_started,
            "dead": self.dead,
            "expected_dollars": _dollars(self.comparison.expected_cents),
            "found_dollars": _dollars(self.comparison.found_cents),
            "difference_dollars": _dollars(self.comparison.difference_cents),
            "wrong_customers": list(self.comparison.wrong[:_NAMED]),
            "seconds": round(self.seconds, 1),
            "seed": self.plan.seed,
            "last_act": self.last_act and self.last_act.as_dict(),
        }

    def _delivered(self, subscriber: str) -> dict[str, Any]:
        figures = asdict(self.deliveries[subscriber])
        del figures["contradictions"]
        return {
            **figures,
            "duplicate_share": round(self.duplicate_share(subscriber), 4),
            "adds_up": self.deliveries[subscriber].adds_up,
        }


_NAMED = 100
"""So many at most are named, of those that are wrong."""


def _dollars(cents: int) -> str:
    return f"{cents // 100}.{cents % 100:02}"
