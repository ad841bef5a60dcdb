"""The purchases: read from the file, counted by the file. The truth that the demo is held against."""

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources

__all__ = ["TOTAL_PURCHASES", "Account", "Purchase", "read_purchases", "totals"]

TOTAL_PURCHASES = 69_659


@dataclass(frozen=True, slots=True)
class Purchase:
    """One line of the file.

    Attributes:
        event_id: made from the line's position: purchases that are equal in every column are different purchases.
        customer_id: five digits.
        date: YYYYMMDD.
        cds: how many.
        cents: what they cost.
    """

    event_id: str
    customer_id: str
    date: str
    cds: int
    cents: int

    def as_json(self) -> str:
        """Return the event's body."""
        return json.dumps(
            {"customer_id": self.customer_id, "date": self.date, "cds": self.cds, "cents": self.cents},
            separators=(",", ":"),
        )


@dataclass(frozen=True, slots=True)
class Account:
    """What one customer has bought."""

    purchases: int = 0
    cds: int = 0
    cents: int = 0

    def plus(self, purchase: Purchase) -> "Account":
        """Return the account after one more purchase."""
        return Account(self.purchases + 1, self.cds + purchase.cds, self.cents + purchase.cents)


def read_purchases(count: int = TOTAL_PURCHASES) -> Iterator[Purchase]:
    """Read the first purchases of the file, one by one.

    Args:
        count: how many.
    """
    packed = resources.files("txbox_demo").joinpath("data", "cdnow_master.txt.gz")
    with packed.open("rb") as raw, gzip.open(raw, "rt", encoding="ascii") as lines:
        next(lines)
        for number, line in enumerate(lines, start=1):
            if number > count:
                return
            customer_id, date, cds, dollars = line.split()
            whole, _, fraction = dollars.partition(".")
            cents = int(whole) * 100 + int(fraction.ljust(2, "0"))
            yield Purchase(f"cdnow-{number:05}", customer_id, date, int(cds), cents)


def totals(purchases: Iterable[Purchase]) -> dict[str, Account]:
    """Add up every customer's purchases in memory, with no database and no messages involved."""
    accounts: defaultdict[str, Account] = defaultdict(Account)
    for purchase in purchases:
        accounts[purchase.customer_id] = accounts[purchase.customer_id].plus(purchase)
    return dict(accounts)
