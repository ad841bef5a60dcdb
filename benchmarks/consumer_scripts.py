"""The consumer's transactions in pgbench's language: the limit that the Python roads are held against.

Every client counts its own messages with ``n``. A message's number ``k`` is ``n``, except that every twentieth repeats
an earlier one; its id and its account follow from ``k`` and the client.
"""

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from business import ACCOUNTS, AMOUNT, SCHEMA, SUBSCRIBER, update_many
from supply import REPEAT_EVERY

from txbox.inbox.inbox import InboxStatements

__all__ = ["Script", "batch_script", "one_statement_script", "single_script"]

INBOX = f"{SCHEMA}.processed_message"
LOCK_TIMEOUT = "1000ms"
RANDOM_SEED = 20_260_101


@dataclass(frozen=True)
class Script:
    """What pgbench runs.

    Attributes:
        text: pgbench's language.
        variables: to give to it.
        seeds: ids to record beforehand, so that their messages are duplicates.
    """

    text: str
    variables: Mapping[str, str | int] = field(default_factory=dict)
    seeds: Sequence[str] = ()


def single_script(record: str | None, ids: str) -> Script:
    """One transaction for each message.

    Args:
        record: None: no inbox; "plain": INSERT ON CONFLICT, as short as it can be written; "ours": what
            ``Inbox.record`` executes.
        ids: "v4" or "v7".
    """
    distance = 50 * REPEAT_EVERY + 1
    lines = [
        r"\set n :n + 1",
        rf"\set k CASE WHEN :n % {REPEAT_EVERY} = 0 AND :n > {distance} THEN :n - {distance} ELSE :n END",
        rf"\set account random(1, {ACCOUNTS})",
        "BEGIN;",
    ]
    update = f"UPDATE {SCHEMA}.account SET balance = balance + {AMOUNT} WHERE account_id = :account;"
    message_id = _id(":k", ids)
    if record is None:
        lines += [update]
    elif record == "plain":
        # \aset leaves the variable alone when there is no row: a duplicate.
        lines += [
            r"\set first 0",
            (
                f"INSERT INTO {INBOX} (subscriber_id, message_id) VALUES ('{SUBSCRIBER}', {message_id})"
                r" ON CONFLICT DO NOTHING RETURNING 1 AS first \aset"
            ),
            *_if_first(update),
        ]
    else:
        values = {
            "lock_timeout": f"'{LOCK_TIMEOUT}'",
            "subscriber_id": f"'{SUBSCRIBER}'",
            "message_id": f"({message_id})",
            "fingerprint": "NULL",
        }
        lines += [
            (InboxStatements.load(SCHEMA).record_one % values).strip().replace("\n", " ") + r" \gset r_",
            *_if_first(update, "r_first"),
        ]
    return Script("\n".join([*lines, "COMMIT;", ""]))


def batch_script(size: int, *, inbox: bool, ids: str) -> Script:
    """One transaction for a batch, in sets: one insert finds the first-timers, one update applies them.

    These are the two statements that a client needs, whose messages do not come from the server. The arrays go over the
    wire as a client's would: ids one way and, of those that are first, back; then the changes. pgbench knows no arrays,
    so they are the same each time, and the server makes other ids and accounts of them.
    """
    generator = random.Random(RANDOM_SEED)
    templates = [f"{generator.getrandbits(128):032x}" for _ in range(size)]
    repeats = max(size // REPEAT_EVERY, 1) if inbox else 0
    batches_between = max(REPEAT_EVERY // size, 1)
    accounts = [generator.randrange(ACCOUNTS) for _ in range(size)]
    variables: dict[str, str | int] = {"ids": _array(templates)} if inbox else {}
    lines = [
        r"\set n :n + 1",
        rf"\set shift random(0, {ACCOUNTS - 1})",
        rf"\set repeats CASE WHEN :n % {batches_between} = 0 THEN {repeats} ELSE 0 END",
        "BEGIN;",
    ]
    if inbox:
        message_id = _id(f"(:n * {size}::bigint + ordinal)", ids)
        lines += [
            (
                f"INSERT INTO {INBOX} (subscriber_id, message_id) SELECT '{SUBSCRIBER}', "
                f'CASE WHEN ordinal > {size} - :repeats THEN template ELSE {message_id} END COLLATE "C" '
                "FROM unnest(:ids::text[]) WITH ORDINALITY AS given (template, ordinal) ORDER BY 2 "
                "ON CONFLICT DO NOTHING RETURNING message_id;"
            )
        ]
    for name, given in (("some", accounts[: size - repeats]), ("all", accounts)):
        totals = Counter(given)
        variables[f"{name}_accounts"] = _array(sorted(totals))
        variables[f"{name}_amounts"] = _array(totals[account] * AMOUNT for account in sorted(totals))
    lines += [r"\if :repeats > 0", _update_many("some"), r"\else", _update_many("all"), r"\endif", "COMMIT;", ""]
    return Script("\n".join(lines), variables, templates[size - repeats :])


def one_statement_script(size: int, ids: str) -> Script:
    """The same for messages that the server makes up itself: one statement, and nothing over the wire."""
    distance = 10 * max(size, REPEAT_EVERY) + 1
    number = f"CASE WHEN given % {REPEAT_EVERY} = 0 AND given > {distance} THEN given - {distance} ELSE given END"
    message = (
        f'SELECT {_id("k", ids)} COLLATE "C" AS message_id, {_account("k")} AS account_id '
        f"FROM (SELECT {number} AS k FROM generate_series(:n - {size - 1}, :n::bigint) AS given) AS numbered"
    )
    recorded = (
        f"INSERT INTO {INBOX} (subscriber_id, message_id) "
        f"SELECT '{SUBSCRIBER}', message_id FROM message ORDER BY message_id "
        "ON CONFLICT DO NOTHING RETURNING message_id"
    )
    before = f"message AS MATERIALIZED ({message}), recorded AS ({recorded}), "
    change = f"SELECT account_id, count(*) * {AMOUNT} FROM message JOIN recorded USING (message_id) GROUP BY 1"
    statement = update_many(change, before).strip().replace("\n", " ") + ";"
    return Script("\n".join([rf"\set n :n + {size}", "BEGIN;", statement, "COMMIT;", ""]))


def _update_many(name: str) -> str:
    # Another shift for each batch: otherwise all clients would ask for the same accounts at the same time.
    change = (
        f"SELECT 1 + (account_id + :shift) % {ACCOUNTS}, amount "
        f"FROM unnest(:{name}_accounts::int[], :{name}_amounts::bigint[]) AS given (account_id, amount)"
    )
    return update_many(change).strip().replace("\n", " ") + ";"


def _array(values: Iterable[object]) -> str:
    return "{" + ",".join(map(str, values)) + "}"


def _if_first(update: str, variable: str = "first") -> list[str]:
    return [rf"\if :{variable}", update, r"\endif"]


def _id(k: str, ids: str) -> str:
    random_digits = f"md5(:client_id::text || '.' || {k}::text)"
    return random_digits if ids == "v4" else f"lpad(to_hex({k}::bigint), 12, '0') || right({random_digits}, 20)"


def _account(k: str) -> str:
    # Another seed for each client: otherwise all of them would ask for the same accounts at the same time.
    return f"(1 + abs(hashint8extended({k}, {RANDOM_SEED} + :client_id) % {ACCOUNTS}))::int"
