"""Reads the purchases from the file with which the demo's result is compared."""

import gzip
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from decimal import Decimal
from importlib import resources
from itertools import islice

TOTAL_PURCHASES = 69_659


@dataclass(frozen=True, slots=True)
class Purchase:
    """One line of the file. Its position is its id, as lines that are equal in every column are different purchases."""

    order_id: str
    customer_id: str
    ordered_on: str
    cds: int
    cents: int

    def as_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))


def read_purchases(count: int = TOTAL_PURCHASES) -> Iterator[Purchase]:
    """Read the file's first purchases one by one."""
    packed = resources.files("txbox_demo").joinpath("data", "cdnow_master.txt.gz")
    with packed.open("rb") as raw, gzip.open(raw, "rt", encoding="ascii") as lines:
        for number, line in enumerate(islice(lines, 1, count + 1), start=1):
            customer_id, day, cds, dollars = line.split()
            yield Purchase(f"cdnow-{number:05}", customer_id, day, int(cds), int(Decimal(dollars) * 100))
