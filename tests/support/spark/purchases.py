"""Purchases in files, to be loaded in bulk, and what they must come to: computed from the rows, by nothing of ours."""

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from support.workers.business import ADD, Business
from support.workers.business import APPLY as EFFECT
from txbox import Message
from txbox_spark import BulkLoadReport

ACCOUNTS = 7

NOTE_BYTES = 1_000

GATE = 8088
"""The advisory lock that ``GATED`` statements wait for."""

WRITE_EFFECT = "INSERT INTO effect (message_id, body) SELECT message_id, amount::text FROM fresh_event"

APPLY = f"""{WRITE_EFFECT};
UPDATE account SET balance = balance + added.amount
FROM (SELECT account_id, sum(amount) AS amount FROM fresh_event GROUP BY account_id) AS added
WHERE account.account_id = added.account_id"""

GATED = f"""{APPLY};
SELECT pg_advisory_xact_lock_shared({GATE}) WHERE (SELECT count(*) FROM bulk_load_chunk) > 2"""
"""Apply, and from the third chunk on wait at the gate, with effects that are not committed."""


@dataclass(frozen=True)
class Purchases:
    """Rows as (id, account, amount); two rows of one id are equal, and rows without an id are bad."""

    rows: tuple[tuple[str | None, int, int], ...]

    @classmethod
    def make(cls, count: int, *, first: int = 0, twice: int = 0, without_id: int = 0) -> "Purchases":
        """Make purchases with different ids, some of which are in the file twice, and some rows without an id."""
        good = [purchase(number) for number in range(first, first + count)]
        again = good[:: max(1, count // twice)][:twice] if twice else []
        bad = [(None, 1, 1_000_000)] * without_id
        # Not in the order of their ids, and duplicates far from each other.
        return cls((*good[1::2], *bad, *good[0::2], *again))

    def write(self, folder: Path, files: int = 4) -> str:
        """Write them as Parquet, in several files, and return the folder.

        Each has a note that cannot be compressed, so that together they are too large to be merged by the driver alone.
        """
        folder.mkdir()
        note = random.Random(1)
        for number in range(files):
            ids, accounts, amounts = zip(*self.rows[number::files], strict=True)
            table = pyarrow.table(
                {
                    "purchase_id": pyarrow.array(ids, pyarrow.string()),
                    "account_id": pyarrow.array(accounts, pyarrow.int32()),
                    "amount": pyarrow.array(amounts, pyarrow.int64()),
                    "note": pyarrow.array([note.randbytes(NOTE_BYTES).hex() for _ in ids], pyarrow.string()),
                }
            )
            parquet.write_table(table, folder / f"{number}.parquet")
        return str(folder)

    @cached_property
    def amounts(self) -> dict[str, tuple[int, int]]:
        """The account and amount of each id."""
        return {id_: (account, amount) for id_, account, amount in self.rows if id_ is not None}

    @property
    def ids(self) -> set[str]:
        """The ids in the file."""
        return set(self.amounts)

    @property
    def rejected(self) -> int:
        """How many rows have no id."""
        return sum(id_ is None for id_, _, _ in self.rows)


def purchase(number: int) -> tuple[str, int, int]:
    """The purchase of this number; the same whoever asks."""
    return f"p{number:06}", number % ACCOUNTS + 1, number * 37 % 991 + 1


class Books(Business):
    """The business tables with an account for each customer."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        with engine.begin() as connection:
            connection.exec_driver_sql(
                f"INSERT INTO account SELECT number, 0 FROM generate_series(1, {ACCOUNTS}) AS number "
                "ON CONFLICT DO NOTHING"
            )

    def assert_exact(self, *loaded: Purchases, subscribers: Iterable[str] = ("billing",)) -> None:
        """Check that each purchase was applied once for each subscriber, and recorded, and that nothing else was."""
        purchases = {id_: amount for one in loaded for id_, amount in one.amounts.items()}
        subscribers = list(subscribers)
        assert self.applied() == Counter(dict.fromkeys(purchases, len(subscribers)))
        owed = dict.fromkeys(range(1, ACCOUNTS + 1), 0)
        for account, amount in purchases.values():
            owed[account] += amount * len(subscribers)
        assert {account: self.balance(account) for account in owed} == owed
        for subscriber in subscribers:
            assert self.recorded(subscriber) == set(purchases)
        assert self.staging_tables() == [], "no staging table outlives its run's success"

    def assert_finished(self, run_id: str) -> None:
        """Check the ledger of a run by itself: every chunk is there, and the run has an end."""
        (finished,) = self.rows(
            "SELECT (finished_at IS NOT NULL, error IS NULL, staging_table IS NULL, chunks = "
            "(SELECT count(*) FROM bulk_load_chunk AS chunk WHERE chunk.run_id = run.run_id))::text "
            f"FROM bulk_load AS run WHERE run_id = '{run_id}'"
        )
        assert finished == "(t,t,t,t)"

    def staging_tables(self) -> list[str]:
        """The staging tables that are there, without their partitions."""
        return self.rows(
            "SELECT relname FROM pg_class WHERE relkind = 'p' AND starts_with(relname, 'bulk_load_staging') "
            "AND pg_table_is_visible(oid)"
        )

    def chunks_done(self) -> int:
        """How many chunks have committed, of all runs."""
        return int(self.rows("SELECT count(*) FROM bulk_load_chunk")[0])

    def waiting(self, kind: str, key: int | None = None) -> int:
        """How many transactions wait for a lock of this kind: ``advisory``, ``relation``, ``transactionid``."""
        named = "" if key is None else f" AND objid = {key}"
        return int(
            self.rows(
                "SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid) "
                f"WHERE datname = current_database() AND locktype = '{kind}' AND NOT granted{named}"
            )[0]
        )

    def waited_for(self) -> set[str]:
        """The transactions that others wait for."""
        return set(
            self.rows(
                "SELECT transactionid::text FROM pg_locks JOIN pg_stat_activity USING (pid) "
                "WHERE datname = current_database() AND locktype = 'transactionid' AND NOT granted"
            )
        )


def settle(session: Session, message: Message) -> None:
    """What ``APPLY`` does, for one message: a handler of live workers."""
    account, amount = map(int, message.text.split())
    session.execute(EFFECT, {"id": message.id, "body": str(amount)})
    session.execute(ADD, {"amount": amount, "account": account})


def messages(purchases: Purchases, ids: Iterable[str]) -> list[Message]:
    """Purchases as live workers get them."""
    return [Message(id_, "{} {}".format(*purchases.amounts[id_]).encode()) for id_ in ids]


def adds_up(report: BulkLoadReport, purchases: Purchases, *, already: int = 0) -> None:
    """Check a report against the file; ``already`` says how many of its ids were in the inbox before."""
    counts: dict[str, Any] = report.as_dict()
    assert {name: counts[name] for name in ("read", "rejected", "duplicate_in_source")} == {
        "read": len(purchases.rows),
        "rejected": purchases.rejected,
        "duplicate_in_source": len(purchases.rows) - purchases.rejected - len(purchases.ids),
    }
    assert (report.already_processed, report.applied) == (already, len(purchases.ids) - already)
