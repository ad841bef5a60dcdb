"""The consumer's transactions in pgbench's language: the limit that the Python roads are held against.

Every client counts its own messages with ``n``. A message's number ``k`` is ``n``, except that every twentieth repeats
an earlier one; its id and its account follow from ``k`` and the client.
"""

from business import ACCOUNTS, AMOUNT, SCHEMA, SUBSCRIBER
from supply import REPEAT_EVERY

from txbox.statements import statements

__all__ = ["batch_script", "single_script"]

INBOX = f"{SCHEMA}.processed_message"
LOCK_TIMEOUT = "1000ms"
RANDOM_SEED = 20_260_101


def single_script(record: str | None, ids: str) -> str:
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
        values = (f"'{LOCK_TIMEOUT}'", f"'{SUBSCRIBER}'", f"({message_id})", "NULL")
        lines += [
            (statements(SCHEMA).record_one % values).strip().replace("\n", " ") + r" \gset r_",
            *_if_first(update, "r_first"),
        ]
    return "\n".join([*lines, "COMMIT;", ""])


def batch_script(size: int, *, inbox: bool, ids: str) -> str:
    """One transaction for a batch, in sets: one insert finds the first-timers, one update applies them."""
    distance = 10 * max(size, REPEAT_EVERY) + 1
    number = f"CASE WHEN given % {REPEAT_EVERY} = 0 AND given > {distance} THEN given - {distance} ELSE given END"
    message = (
        f'message AS MATERIALIZED (SELECT {_id("k", ids)} COLLATE "C" AS message_id, {_account("k")} AS account_id '
        f"FROM (SELECT {number} AS k FROM generate_series(:n - {size - 1}, :n::bigint) AS given) AS numbered)"
    )
    recorded = (
        f"recorded AS (INSERT INTO {INBOX} (subscriber_id, message_id) "
        f"SELECT '{SUBSCRIBER}', message_id FROM message ORDER BY message_id "
        "ON CONFLICT DO NOTHING RETURNING message_id)"
    )
    source = "message JOIN recorded USING (message_id)" if inbox else "message"
    statement = (
        f"WITH {message}{', ' + recorded if inbox else ''} "
        f"UPDATE {SCHEMA}.account SET balance = balance + change.amount "
        f"FROM (SELECT account_id, count(*) * {AMOUNT} AS amount FROM {source} GROUP BY 1 ORDER BY 1) AS change "
        "WHERE account.account_id = change.account_id;"
    )
    return "\n".join([rf"\set n :n + {size}", "BEGIN;", statement, "COMMIT;", ""])


def _if_first(update: str, variable: str = "first") -> list[str]:
    return [rf"\if :{variable}", update, r"\endif"]


def _id(k: str, ids: str) -> str:
    random_digits = f"md5(:client_id::text || '.' || {k}::text)"
    return random_digits if ids == "v4" else f"lpad(to_hex({k}::bigint), 12, '0') || right({random_digits}, 20)"


def _account(k: str) -> str:
    # Another seed for each client: otherwise all of them would ask for the same accounts at the same time.
    return f"(1 + abs(hashint8extended({k}, {RANDOM_SEED} + :client_id) % {ACCOUNTS}))::int"
