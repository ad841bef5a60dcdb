"""Items that remember their messages, in a DynamoDB over HTTP."""

import random
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from botocore.config import Config

from txbox import EntityMissing, InvalidConfiguration, InvalidMessageId, LedgerError
from txbox_aws.dynamodb import dynamodb_client
from txbox_aws.dynamodb.entity import update_if_newer, update_once
from txbox_aws.dynamodb.items import plain
from txbox_local import LocalAws

if TYPE_CHECKING:
    from types_boto3_dynamodb import DynamoDBClient

THREADS = 16


@pytest.fixture
def client(aws: LocalAws) -> Iterator["DynamoDBClient"]:
    client = boto3.client("dynamodb", config=Config(max_pool_connections=THREADS))
    yield client
    client.close()


class Accounts:
    """A table of accounts; ann's is there."""

    def __init__(self, client: "DynamoDBClient") -> None:
        self.client = client
        self.table = f"account-{uuid.uuid4().hex[:8]}"
        client.create_table(
            TableName=self.table,
            AttributeDefinitions=[{"AttributeName": "select", "AttributeType": "S"}],
            KeySchema=[{"AttributeName": "select", "KeyType": "HASH"}],
            BillingMode="PAY_PER_REQUEST",
        )
        client.put_item(TableName=self.table, Item={"select": {"S": "ann"}, "cents": {"N": "0"}})

    def add(self, message_id: str, cents: int = 1, *, name: str = "ann", **options: Any) -> bool:
        options = {"update": "SET cents = cents + :cents", "values": {":cents": cents}} | options
        return update_once(self.client, self.table, {"select": name}, message_id, **options)

    def replace(self, event_id: Any, cents: int, *, source: str = "shop", name: str = "ann", **options: Any) -> bool:
        options = {"update": "SET cents = :cents", "values": {":cents": cents}} | options
        return update_if_newer(self.client, self.table, {"select": name}, source, event_id, **options)

    def put(self, attribute: str, value: Any) -> None:
        self.client.put_item(TableName=self.table, Item={"select": {"S": "ann"}, attribute: value})

    def item(self, name: str = "ann") -> dict[str, Any]:
        found = self.client.get_item(TableName=self.table, Key={"select": {"S": name}}, ConsistentRead=True)
        return plain(found.get("Item", {}))


@pytest.fixture
def accounts(client: "DynamoDBClient") -> Accounts:
    return Accounts(client)


# -- update_once ----------------------------------------------------------------------------------------------------


def test_the_first_time_is_applied_and_every_other_time_is_not(accounts: Accounts) -> None:
    assert [accounts.add("m-1", 5) for _ in range(3)] == [True, False, False]
    assert accounts.add("m-2", 7)
    assert not accounts.add("m-1", 5)
    assert accounts.item() == {"select": "ann", "cents": 12, "processed_message_ids": {"m-1", "m-2"}}


def test_an_id_that_is_part_of_another_one_is_another_one(accounts: Accounts) -> None:
    assert accounts.add("m-10")
    assert accounts.add("m-1")
    assert accounts.add("m-")


def test_the_table_of_the_librarys_own_client_is_as_good(accounts: Accounts) -> None:
    accounts.client = dynamodb_client()
    assert accounts.add("m-1")
    assert not accounts.add("m-1")
    accounts.client.close()


@pytest.mark.parametrize(
    ("update", "expected"),
    [
        ("", {}),
        ("SET #set = :one", {"SET": 1}),
        ("ADD visits :one", {"visits": 1}),
        ("add visits :one,  points :two SET note=:text", {"visits": 1, "points": 2, "note": "x"}),
        ("ADD\n  visits :one", {"visits": 1}),
        ("SET #add = :one ADD #ADD.visits :one", {"add": 1, "ADD": {"visits": 1}}),
        ("REMOVE cents SET note = :text", {"cents": None, "note": "x"}),
        ("REMOVE #add ADD visits :one", {"add": None, "visits": 1}),
        ("SET address = :one, padd = :two", {"address": 1, "padd": 2}),
    ],
)
def test_the_callers_clauses_are_kept(accounts: Accounts, update: str, expected: dict[str, Any]) -> None:
    placeholders = {"#set": "SET", "#add": "add", "#ADD": "ADD"}
    constants = {":one": 1, ":two": 2, ":text": "x"}
    names = {name: meant for name, meant in placeholders.items() if name in update.replace(",", " ").split(" ")}
    if "#ADD." in update:
        names["#ADD"] = "ADD"
        accounts.put("ADD", {"M": {}})
    values = {name: meant for name, meant in constants.items() if name in update}
    assert accounts.add("m-1", update=update, names=names, values=values)
    item = accounts.item()
    assert {name: item.get(name) for name in expected} == expected
    assert item["processed_message_ids"] == {"m-1"}
    if update:
        assert accounts.replace(7, 0, update=update, names=names, values=values)
        assert accounts.item()["highest_event_id:shop"] == 7


def test_values_may_be_of_every_kind(accounts: Accounts) -> None:
    value = {"list": [1, None, True], "bytes": b"\0", "set": {"a", "b"}, "S": "x"}
    assert accounts.add("m-1", update="SET thing = :thing", values={":thing": value})
    assert accounts.item()["thing"] == value


def test_an_item_that_is_not_there_is_no_duplicate_and_is_not_made(accounts: Accounts) -> None:
    with pytest.raises(EntityMissing) as missing:
        accounts.add("m-1", name="eve")
    assert (missing.value.entity, missing.value.key) == (accounts.table, "select='eve'")
    with pytest.raises(EntityMissing):
        accounts.replace(1, 1, name="eve")
    with pytest.raises(EntityMissing):
        accounts.add("m-1", name="eve", condition="attribute_not_exists(cents)")
    assert accounts.item("eve") == {}


def test_an_item_is_made_if_that_is_asked_for(accounts: Accounts) -> None:
    options: dict[str, Any] = {"update": "ADD cents :cents", "create": True, "name": "eve"}
    assert accounts.add("m-1", 5, **options)
    assert not accounts.add("m-1", 5, **options)
    assert accounts.item("eve") == {"select": "eve", "cents": 5, "processed_message_ids": {"m-1"}}
    assert accounts.replace(1, 9, create=True, name="bob")
    assert not accounts.replace(1, 9, create=True, name="bob")
    assert accounts.item("bob") == {"select": "bob", "cents": 9, "highest_event_id:shop": 1}


def test_a_condition_of_the_callers_that_is_not_met_is_no_duplicate(accounts: Accounts) -> None:
    withdraw: dict[str, Any] = {
        "update": "SET cents = cents - :cents",
        "condition": "cents >= :cents OR cents = :cents",
    }
    refused = accounts.client.exceptions.ConditionalCheckFailedException
    with pytest.raises(refused) as error:
        accounts.add("m-1", 5, **withdraw)
    assert plain(error.value.response["Item"]) == {"select": "ann", "cents": 0}  # type: ignore[typeddict-item]
    with pytest.raises(refused):
        accounts.replace(1, 5, condition="cents >= :cents")
    assert accounts.item() == {"select": "ann", "cents": 0}, "the id is not recorded"
    accounts.add("m-0", 5)
    assert accounts.add("m-1", 5, **withdraw)
    assert not accounts.add("m-1", 5, **withdraw), "a duplicate is one whatever the condition says by now"
    for condition in ("cents >= :cents OR cents = :cents", "(cents >= :cents OR cents = :cents)"):
        with pytest.raises(refused):
            accounts.add("m-2", 5, **withdraw | {"condition": condition})
    assert accounts.replace(1, 4)
    with pytest.raises(refused):
        accounts.replace(2, 5, condition="cents >= :cents")
    assert not accounts.replace(1, 5, condition="cents >= :cents")
    assert accounts.item()["processed_message_ids"] == {"m-0", "m-1"}
    with pytest.raises(refused):
        accounts.add("m-1", 5, name="eve", create=True, condition="cents > :cents")


def test_a_condition_with_or_lets_no_duplicate_through(accounts: Accounts) -> None:
    either = "cents > :cents OR attribute_exists(cents)"
    assert [accounts.add("m-1", 5, condition=either) for _ in range(2)] == [True, False]
    assert [accounts.replace(7, 5, condition=either) for _ in range(2)] == [True, False]
    with pytest.raises(EntityMissing):
        accounts.add("m-1", name="eve", condition="cents > :cents OR attribute_not_exists(cents)")


@pytest.mark.parametrize("value", [{"S": "m-1 m-2"}, {"L": [{"S": "m-1"}]}, {"NS": ["1"]}])
def test_an_attribute_that_is_no_set_of_texts_is_refused(accounts: Accounts, value: Any) -> None:
    accounts.put("processed_message_ids", value)
    with pytest.raises(InvalidConfiguration, match="ids must name a set of texts"):
        accounts.add("m-1", update="", values={})


def test_the_memory_can_have_another_name(accounts: Accounts) -> None:
    assert accounts.add("m-1", ids="seen.by-us")
    assert accounts.replace(4, 1, highest="newest")
    assert accounts.item() == {"select": "ann", "cents": 1, "seen.by-us": {"m-1"}, "newest:shop": 4}


# -- update_if_newer ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ids",
    [
        [2, 10, 9, 10, 11, 2],
        [-5, -6, 0, 0, -1, 1],
        [2**53, 2**53 + 1, 2**53, 10**38 - 1, 10**38 - 2, 2**64],
        ["B", "a", "Z", "é", "z", "aa"],
        ["10", "9", "10", "1", "90", "91"],
    ],
)
def test_what_is_not_higher_than_all_before_is_dropped(accounts: Accounts, ids: list[Any]) -> None:
    expected, highest = [], None
    for event_id in ids:
        key = event_id if isinstance(event_id, int) else event_id.encode()
        expected.append(highest is None or key > highest)
        highest = key if expected[-1] else highest
    assert [accounts.replace(event_id, number) for number, event_id in enumerate(ids)] == expected
    last = max(number for number, was in enumerate(expected) if was)
    assert accounts.item() == {"select": "ann", "cents": last, "highest_event_id:shop": ids[last]}


def test_each_source_has_an_order_of_its_own(accounts: Accounts) -> None:
    assert accounts.replace(7, 1, source="shop")
    assert accounts.replace(3, 2, source="till #1: left.hand")
    assert not accounts.replace(3, 4, source="shop")
    assert accounts.item()["highest_event_id:till #1: left.hand"] == 3


@pytest.mark.parametrize(("before", "after"), [(5, "6"), ("5", 6), (0, "0")])
def test_numbers_and_texts_of_one_source_are_never_compared(accounts: Accounts, before: Any, after: Any) -> None:
    assert accounts.replace(before, 1)
    with pytest.raises(InvalidConfiguration, match="cannot be compared with"):
        accounts.replace(after, 2)
    assert accounts.item() == {"select": "ann", "cents": 1, "highest_event_id:shop": before}


def test_what_is_neither_number_nor_text_is_refused(accounts: Accounts) -> None:
    accounts.put("highest_event_id:shop", {"M": {}})
    with pytest.raises(InvalidConfiguration, match="cannot be compared with"):
        accounts.replace(1, 2)


# -- refusals and trouble -------------------------------------------------------------------------------------------


def test_what_cannot_work_is_refused_before_anything_is_called(accounts: Accounts) -> None:
    with pytest.raises(InvalidMessageId):
        accounts.add("")
    with pytest.raises(InvalidConfiguration, match="#txbox_memory must not begin like"):
        accounts.add("m-1", names={"#txbox_memory": "x"})
    with pytest.raises(InvalidConfiguration, match=":txbox_id must not begin like"):
        accounts.replace(1, 1, values={":txbox_id": "x"})
    with pytest.raises(InvalidConfiguration, match="source must be"):
        accounts.replace(1, 1, source="")
    for key in ({}, {"select": {"S": "ann"}}):
        with pytest.raises(InvalidConfiguration, match="key must be Python values"):
            update_once(accounts.client, accounts.table, key, "m-1", update="")
    with pytest.raises(TypeError, match=r"[Ff]loat"):
        accounts.add("m-1", values={":cents": 1.5})


def test_trouble_has_a_remedy(accounts: Accounts) -> None:
    accounts.client.delete_table(TableName=accounts.table)
    with pytest.raises(LedgerError, match=f"create the table {accounts.table}") as error:
        accounts.add("m-1")
    assert error.value.permanent


@pytest.mark.parametrize(
    "options",
    [
        {"update": "SET order = :cents"},  # a reserved word
        {"update": "SET cents = cents + :cent"},
        {"update": "SET cents = cents +"},
        {"values": {":cents": 1, ":left": 2}},
    ],
    ids=str,
)
def test_an_expression_that_dynamodb_does_not_take_has_a_remedy(accounts: Accounts, options: dict[str, Any]) -> None:
    for apply in (accounts.add, accounts.replace):
        with pytest.raises(
            LedgerError, match="`update`, `condition`, `names` or `values` do not fit together"
        ) as error:
            apply("m-1", 1, **options)
        assert error.value.permanent
    assert accounts.item() == {"select": "ann", "cents": 0}


# -- races ----------------------------------------------------------------------------------------------------------


def test_sixteen_threads_with_the_same_messages_apply_each_once(accounts: Accounts, pool: ThreadPoolExecutor) -> None:
    amounts = {f"m-{number}": 3**number for number in range(12)}

    def deliver_all(seed: int) -> Counter[str]:
        applied: Counter[str] = Counter()
        for message_id in random.Random(seed).sample(sorted(amounts), len(amounts)):
            applied[message_id] += update_once(
                accounts.client,
                accounts.table,
                {"select": "ann"},
                message_id,
                update="ADD cents :cents",
                values={":cents": amounts[message_id]},
            )
        return applied

    total = sum(pool.map(deliver_all, range(THREADS)), Counter())
    assert total == dict.fromkeys(amounts, 1)
    assert accounts.item() == {"select": "ann", "cents": sum(amounts.values()), "processed_message_ids": set(amounts)}


def test_sixteen_threads_with_events_out_of_order_leave_the_highest(
    accounts: Accounts, pool: ThreadPoolExecutor
) -> None:
    def deliver_all(seed: int) -> list[int]:
        return [n for n in random.Random(seed).sample(range(20), 20) if accounts.replace(n, n * 7)]

    applied = [event_id for part in pool.map(deliver_all, range(THREADS)) for event_id in part]
    assert len(applied) == len(set(applied)), "none was applied twice"
    assert accounts.item() == {"select": "ann", "cents": 19 * 7, "highest_event_id:shop": 19}
