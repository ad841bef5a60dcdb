"""How the leases in a table of DynamoDB stand."""

from typing import Any

import pytest

from support.txbox.leases import Store, acquired
from txbox import LedgerError
from txbox.leases.status import LeaseStatus, LedgerStatus
from txbox_aws.dynamodb.table import read_lease_table


def test_a_table_that_is_empty_has_no_ledgers(dynamodb: Any, store: Store) -> None:
    assert read_lease_table(store.arguments["table"], client=dynamodb) == LeaseStatus()


def test_what_becomes_of_messages_is_counted_by_subscriber(dynamodb: Any, store: Store) -> None:
    mailing, gifts = store.ledger("mailing"), store.ledger("gifts")
    mailing.check()
    for number in range(3):
        mailing.complete(acquired(mailing, f"done {number}"))
    mailing.release(acquired(mailing, "failed"))
    acquired(mailing, "dead", lease_seconds=600)
    store.expire("dead")
    for number in range(2):
        acquired(mailing, f"at work {number}", lease_seconds=600)
    acquired(gifts, "at work 0", lease_seconds=600)
    found = read_lease_table(store.arguments["table"], client=dynamodb)
    assert found == LeaseStatus(
        8,
        ledgers=(
            LedgerStatus("gifts", in_flight=1),
            LedgerStatus("mailing", completed=3, in_flight=2, run_out=1, failed=1),
        ),
    )


def test_a_large_table_is_not_read(dynamodb: Any, store: Store) -> None:
    ledger = store.ledger()
    for number in range(3):
        ledger.complete(acquired(ledger, str(number)))
    found = read_lease_table(store.arguments["table"], client=dynamodb, exact_up_to_rows=2)
    assert found == LeaseStatus(3, exact=False)


def test_a_table_that_is_not_there_is_named_with_the_remedy(dynamodb: Any) -> None:
    with pytest.raises(LedgerError, match="create the table no_such_table, or correct its name") as caught:
        read_lease_table("no_such_table", client=dynamodb)
    assert caught.value.permanent
