"""The consumer's transactions in pgbench's language: the limit that the worker is compared with.

Every client counts its own messages with ``n``. A message's number ``k`` is ``n``, except that every twentieth repeats
an earlier one; its id follows from ``k`` and the client.
"""

import random
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from benchmarks.consumer.deliveries import REPEAT_EVERY
from benchmarks.shared.database import ACCOUNTS, AMOUNT, SCHEMA, SUBSCRIBER
from benchmarks.shared.effects import update_many

INBOX = f"{SCHEMA}.processed_message"
RANDOM_SEED = 20_260_101


class Script(NamedTuple):
    """What pgbench runs: its text, variables to give to it, and ids to record beforehand, to be met as duplicates."""

    text: str
    variables: dict[str, str | int]
    seeds: list[str]


def single_script(*, inbox: bool) -> Script:
    """One transaction for each message, with the inbox or without."""
    distance = 50 * REPEAT_EVERY + 1
    update = f"UPDATE {SCHEMA}.account SET balance = balance + {AMOUNT} WHERE account_id = :account;"
    # \aset leaves the variable alone when there is no row: a duplicate.
    insert = (
        f"INSERT INTO {INBOX} (subscriber_id, message_id) VALUES ('{SUBSCRIBER}', {_id(':k')})"
        r" ON CONFLICT DO NOTHING RETURNING 1 AS first \aset"
    )
    lines = [
        r"\set n :n + 1",
        rf"\set k CASE WHEN :n % {REPEAT_EVERY} = 0 AND :n > {distance} THEN :n - {distance} ELSE :n END",
        rf"\set account random(1, {ACCOUNTS})",
        "BEGIN;",
        *([r"\set first 0", insert, r"\if :first", update, r"\endif"] if inbox else [update]),
        "COMMIT;\n",
    ]
    return Script("\n".join(lines), {"n": 0}, [])


def batch_script(size: int) -> Script:
    """One transaction for a batch, in sets: one insert finds the first-timers, one update applies them.

    These are the two statements that a client needs, whose messages do not come from the server. The arrays go over the
    wire as a client's would: ids one way and, of those that are first, back; then the changes. pgbench knows no arrays,
    so they are the same each time, and the server makes other ids and accounts of them.
    """
    generator = random.Random(RANDOM_SEED)
    templates = [f"{generator.getrandbits(128):032x}" for _ in range(size)]
    repeats = max(size // REPEAT_EVERY, 1)
    accounts = [generator.randrange(ACCOUNTS) for _ in range(size)]
    variables: dict[str, str | int] = {"n": 0, "ids": _array(templates)}
    for name, given in (("some", accounts[: size - repeats]), ("all", accounts)):
        totals = Counter(given)
        variables[f"{name}_accounts"] = _array(sorted(totals))
        variables[f"{name}_amounts"] = _array(totals[account] * AMOUNT for account in sorted(totals))
    insert = (
        f"INSERT INTO {INBOX} (subscriber_id, message_id) SELECT '{SUBSCRIBER}', CASE WHEN ordinal > {size} - :repeats "
        f'THEN template ELSE {_id(f"(:n * {size}::bigint + ordinal)")} END COLLATE "C" '
        "FROM unnest(:ids::text[]) WITH ORDINALITY AS given (template, ordinal) ORDER BY 2 "
        "ON CONFLICT DO NOTHING RETURNING message_id;"
    )
    lines = [
        r"\set n :n + 1",
        rf"\set shift random(0, {ACCOUNTS - 1})",
        rf"\set repeats CASE WHEN :n % {max(REPEAT_EVERY // size, 1)} = 0 THEN {repeats} ELSE 0 END",
        *("BEGIN;", insert),
        *(r"\if :repeats > 0", _update_many("some"), r"\else", _update_many("all"), r"\endif"),
        "COMMIT;\n",
    ]
    return Script("\n".join(lines), variables, templates[size - repeats :])


def _update_many(name: str) -> str:
    # Another shift for each batch: otherwise all clients would ask for the same accounts at the same time.
    change = (
        f"SELECT 1 + (account_id + :shift) % {ACCOUNTS}, amount "
        f"FROM unnest(:{name}_accounts::int[], :{name}_amounts::bigint[]) AS given (account_id, amount)"
    )
    return update_many(change).strip().replace("\n", " ") + ";"


def _array(values: Iterable[object]) -> str:
    return "{" + ",".join(map(str, values)) + "}"


def _id(k: str) -> str:
    return f"md5(:client_id::text || '.' || {k}::text)"
