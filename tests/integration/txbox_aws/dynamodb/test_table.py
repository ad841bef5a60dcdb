"""The table of a ledger in DynamoDB: what is said if it is not there, or another one, and how its leases stand."""

import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support.txbox.leases import Store, acquired
from txbox import LedgerError
from txbox.leases.status import LeaseStatus, LedgerStatus
from txbox_aws.dynamodb import DynamoDBLedger, create_lease_table
from txbox_aws.dynamodb.table import read_lease_table


@pytest.fixture
def name() -> str:
    return f"lease_{uuid.uuid4().hex[:8]}"


def make(dynamodb: Any, name: str, *keys: tuple[str, str, str]) -> None:
    dynamodb.create_table(
        TableName=name,
        KeySchema=[{"AttributeName": key, "KeyType": kind} for key, kind, _ in keys],
        AttributeDefinitions=[{"AttributeName": key, "AttributeType": of} for key, _, of in keys],
        BillingMode="PAY_PER_REQUEST",
    )


def test_the_table_is_paid_by_request_and_rids_itself_of_old_items(dynamodb: Any, name: str) -> None:
    create_lease_table(name, client=dynamodb)
    table = dynamodb.describe_table(TableName=name)["Table"]
    assert table["TableStatus"] == "ACTIVE"
    assert table["BillingModeSummary"]["BillingMode"] == "PAY_PER_REQUEST"
    assert dynamodb.describe_time_to_live(TableName=name)["TimeToLiveDescription"] == {
        "TimeToLiveStatus": "ENABLED",
        "AttributeName": "remove_at",
    }
    DynamoDBLedger("mailing", table=name, client=dynamodb).check()


def test_one_that_exists_is_left_with_what_is_in_it(dynamodb: Any, name: str) -> None:
    create_lease_table(name, client=dynamodb)
    ledger = DynamoDBLedger("mailing", table=name, client=dynamodb)
    lease = acquired(ledger, "m1")
    create_lease_table(name, client=dynamodb)
    ledger.complete(lease)


def test_several_may_create_it_at_once(dynamodb: Any, name: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        for made in [pool.submit(create_lease_table, name, client=dynamodb) for _ in range(8)]:
            made.result()
    assert dynamodb.describe_time_to_live(TableName=name)["TimeToLiveDescription"]["TimeToLiveStatus"] == "ENABLED"


def test_removal_is_switched_on_in_a_table_that_was_made_otherwise(dynamodb: Any, name: str) -> None:
    make(dynamodb, name, ("message_id", "HASH", "S"), ("subscriber_id", "RANGE", "S"))
    create_lease_table(name, client=dynamodb)
    assert dynamodb.describe_time_to_live(TableName=name)["TimeToLiveDescription"]["AttributeName"] == "remove_at"


@pytest.mark.parametrize(
    "keys",
    [
        [("message_id", "HASH", "S")],
        [("subscriber_id", "HASH", "S"), ("message_id", "RANGE", "S")],
        [("message_id", "HASH", "N"), ("subscriber_id", "RANGE", "S")],
    ],
)
def test_one_with_other_keys_is_refused(dynamodb: Any, name: str, keys: list[tuple[str, str, str]]) -> None:
    make(dynamodb, name, *keys)
    with pytest.raises(LedgerError, match=rf"{name} exists with other keys: {keys[0][0]} .*choose another") as caught:
        create_lease_table(name, client=dynamodb)
    assert caught.value.permanent


def test_a_ledger_on_a_table_with_other_keys_says_so(dynamodb: Any, name: str) -> None:
    make(dynamodb, name, ("message_id", "HASH", "S"))
    with pytest.raises(LedgerError, match=f"is {name} a table that create_lease_table has made") as caught:
        DynamoDBLedger("mailing", table=name, client=dynamodb).check()
    assert caught.value.permanent


def test_one_that_removes_by_something_else_is_refused(dynamodb: Any, name: str) -> None:
    make(dynamodb, name, ("message_id", "HASH", "S"), ("subscriber_id", "RANGE", "S"))
    dynamodb.update_time_to_live(
        TableName=name, TimeToLiveSpecification={"Enabled": True, "AttributeName": "expires_at"}
    )
    with pytest.raises(LedgerError, match="removes items by expires_at; a ledger needs remove_at") as caught:
        create_lease_table(name, client=dynamodb)
    assert caught.value.permanent


def test_without_a_table_the_remedy_is_named(dynamodb: Any, name: str) -> None:
    ledger = DynamoDBLedger("mailing", table=name, client=dynamodb)
    for call in (ledger.check, lambda: ledger.acquire("m1")):
        with pytest.raises(LedgerError, match=rf"create it with .*create_lease_table\('{name}'\)") as caught:
            call()
        assert caught.value.permanent


def test_a_ledger_makes_a_client_of_its_own_by_boto3s_settings(dynamodb: Any, name: str) -> None:
    create_lease_table(name)
    ledger = DynamoDBLedger("mailing", table=name)
    lease = acquired(ledger, "m1")
    ledger.close()
    ledger.complete(lease, b"done")
    assert ledger.acquire("m1").result == b"done"
    ledger.close()


# --- how its leases stand ---------------------------------------------------------------------------------------------


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
