"""The producers' transactions in pgbench's language: the business update with and without our INSERT."""

from business import ACCOUNTS, AMOUNT, SCHEMA
from consumer_scripts import Script
from relay_place import BODY, COLUMNS, DESTINATION

from txbox.outbox.lanes import LANES_PER_DESTINATION, lane_of
from txbox.outbox.notifier import CHANNEL
from txbox.outbox.statements import outbox_statements

__all__ = ["business_script"]


def business_script(*, publish: bool, order: bool = False, plain: bool = False, notify: bool = False) -> Script:
    """One transaction: an amount onto an account, the smallest there is; and what is asked for beside it.

    Args:
        publish: with the statement that ``Outbox.publish`` executes, its id made by the server.
        order: with the row of an order too, as a shop's transaction has.
        plain: into the table of the limit, which has a key and nothing else: what any outbox costs.
        notify: with a NOTIFY before the commit, as we do not.
    """
    first_lane = lane_of(DESTINATION, None, "") // LANES_PER_DESTINATION * LANES_PER_DESTINATION
    lines = [
        r"\set n :n + 1",
        rf"\set account random(1, {ACCOUNTS})",
        rf"\set lane {first_lane} + random(0, {LANES_PER_DESTINATION - 1})",
        "BEGIN;",
        f"UPDATE {SCHEMA}.account SET balance = balance + {AMOUNT} WHERE account_id = :account;",
    ]
    if order:
        lines += [f"INSERT INTO {SCHEMA}.purchase_order (account_id, cents) VALUES (:account, {AMOUNT});"]
    if publish:
        # Ids that grow, as the outbox's do; another one for each client.
        message_id = "lpad(to_hex(:n::bigint), 12, '0') || '-' || :client_id::text || '-0198a1f27f6e7cc1b5d'"
        message = f"{message_id}, :destination, NULL, :headers::jsonb, :body"
        values = (":lane::bigint", message_id, ":destination", "NULL", ":headers", ":body", "NULL", "NULL")
        ours = outbox_statements(SCHEMA).publish_one.strip() % values
        lines += [f"INSERT INTO {SCHEMA}.raw_outbox ({COLUMNS}) VALUES ({message});" if plain else f"{ours};"]
    if notify:
        lines += [f"NOTIFY {CHANNEL};"]
    given: dict[str, str | int] = {"destination": DESTINATION, "headers": "{}", "body": BODY} if publish else {}
    return Script("\n".join([*lines, "COMMIT;", ""]), {"n": 0, **given})
