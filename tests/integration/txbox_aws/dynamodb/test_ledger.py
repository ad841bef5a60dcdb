"""A ledger in DynamoDB: what is in its items, and what it makes of DynamoDB's refusals."""

import json
import time
import types
from collections.abc import Callable
from typing import Any

import boto3
import pytest
from botocore.awsrequest import AWSResponse
from botocore.config import Config

from support.txbox.leases import Store, acquired
from txbox import InvalidConfiguration, LeaseLost, LedgerError, Mismatch, ResultNotStored, idempotent
from txbox.leases import LeaseState
from txbox_aws.dynamodb import DynamoDBLedger
from txbox_aws.dynamodb.items import typed
from txbox_aws.dynamodb.ledger import MAX_RESULT_BYTES, RETENTION_SECONDS
from txbox_local import LocalAws

DAY = 24 * 60 * 60


def milliseconds() -> int:
    """The time: this machine is the store's too."""
    return time.time_ns() // 1_000_000


def test_an_item_says_who_works_until_when_in_the_stores_time(store: Store, item: Callable[..., Any]) -> None:
    before = milliseconds()
    lease = acquired(store.ledger(), "m1", lease_seconds=20, fingerprint=b"f" * 32)
    found = item("m1")
    assert found["fence"] == lease.fence
    assert (found["attempts"], found["failures"], found["fingerprint"]) == (1, 0, b"f" * 32)
    assert str(found["owner"])
    assert before + 20_000 <= found["expires_at"] <= milliseconds() + 22_000
    assert "completed_at" not in found


def test_a_renewal_begins_when_it_is_asked_for(store: Store, item: Callable[..., Any]) -> None:
    ledger = store.ledger()
    lease = acquired(ledger, "m1", lease_seconds=20)
    before = milliseconds()
    ledger.renew(lease, lease_seconds=50)
    assert before + 50_000 <= item("m1")["expires_at"] <= milliseconds() + 52_000
    assert 49 < lease.seconds_left <= 50
    ledger.renew(lease, lease_seconds=5)
    assert item("m1")["expires_at"] <= milliseconds() + 7_000
    assert lease.seconds_left <= 5


@pytest.mark.parametrize("end", ["complete", "release", "neither"])
def test_an_item_is_removed_some_days_after_its_last_step(store: Store, item: Callable[..., Any], end: str) -> None:
    ledger = store.ledger()
    lease = acquired(ledger, "m1", lease_seconds=DAY)
    if end != "neither":
        getattr(ledger, end)(lease)
    expected = time.time() + RETENTION_SECONDS + (DAY if end == "neither" else 0)
    assert expected - 5 <= item("m1")["remove_at"] <= expected + 5


def test_the_retention_is_of_choice(dynamodb: Any, table: str, item: Callable[..., Any]) -> None:
    ledger = DynamoDBLedger("mailing", table=table, client=dynamodb, retention_seconds=60)
    ledger.complete(acquired(ledger, "m1"))
    assert abs(item("m1")["remove_at"] - time.time() - 60) < 5


def test_what_should_have_been_removed_and_is_still_there_counts(store: Store, put: Callable[..., None]) -> None:
    ledger = store.ledger()
    ledger.complete(acquired(ledger, "m1"), b"sent")
    put("m1", remove_at=1)
    assert store.ledger().acquire("m1").result == b"sent"


def test_the_fence_grows_even_if_the_item_was_removed_meanwhile(dynamodb: Any, store: Store, table: str) -> None:
    ledger = store.ledger()
    first = acquired(ledger, "m1")
    dynamodb.delete_item(TableName=table, Key={"message_id": typed("m1"), "subscriber_id": typed("mailing")})
    with pytest.raises(LeaseLost):
        ledger.renew(first)
    assert acquired(ledger, "m1").fence > first.fence
    with pytest.raises(LeaseLost):
        ledger.complete(first)


def test_a_completed_message_is_told_by_a_read_to_who_asks_first(dynamodb: Any, aws: LocalAws, store: Store) -> None:
    ledger = store.ledger()
    ledger.complete(acquired(ledger, "m1"), b"sent")
    client: Any = boto3.client("dynamodb", endpoint_url=aws.endpoint_url)
    calls: list[str] = []
    reads: list[bool] = []
    client.meta.events.register("before-call.dynamodb.*", lambda model, **_: calls.append(model.name))
    client.meta.events.register(
        "provide-client-params.dynamodb.GetItem", lambda params, **_: reads.append(params["ConsistentRead"])
    )
    fresh = DynamoDBLedger("mailing", table=store.arguments["table"], client=client)
    assert fresh.acquire("m1").result == b"sent"
    assert calls == ["GetItem"]
    assert reads == [True]
    assert fresh.acquire("m2").state is LeaseState.ACQUIRED
    assert calls == ["GetItem", "UpdateItem"]
    client.close()


def test_a_lease_costs_two_requests_and_a_duplicate_one(aws: LocalAws, store: Store) -> None:
    client: Any = boto3.client("dynamodb", endpoint_url=aws.endpoint_url)
    calls: list[str] = []
    client.meta.events.register("before-call.dynamodb.*", lambda model, **_: calls.append(model.name))
    ledger = DynamoDBLedger("mailing", table=store.arguments["table"], client=client)
    send = idempotent(lambda message_id: f"sent {message_id}", ledger=ledger, identify=lambda message_id: message_id)
    seen = []
    for message_id in ("m1", "m2", "m2"):
        calls.clear()
        send(message_id)
        seen.append(tuple(calls))
    assert seen == [("GetItem", "UpdateItem", "UpdateItem"), ("UpdateItem", "UpdateItem"), ("UpdateItem",)]
    client.close()


@pytest.mark.parametrize("size", [MAX_RESULT_BYTES + 1, 2_000_000])
def test_a_result_that_no_item_holds_is_not_kept_and_the_message_is_completed(store: Store, size: int) -> None:
    ledger = store.ledger()
    lease = acquired(ledger, "m1")
    with pytest.raises(ResultNotStored, match=f"holds at most {MAX_RESULT_BYTES:,} bytes .* it has {size:,}"):
        ledger.complete(lease, b"x" * size)
    again = ledger.acquire("m1")
    assert (again.state, again.result) == (LeaseState.COMPLETED, None)


def test_a_result_that_dynamodb_itself_finds_too_large_is_not_kept_either(store: Store) -> None:
    """moto counts what base64 makes of it; DynamoDB may one day count otherwise too."""
    ledger = store.ledger()
    with pytest.raises(ResultNotStored):
        ledger.complete(acquired(ledger, "m1"), b"x" * (MAX_RESULT_BYTES - 1))
    assert ledger.acquire("m1").state is LeaseState.COMPLETED


def test_the_first_answer_may_be_that_the_payload_differs(store: Store) -> None:
    acquired(store.ledger(), "m1", fingerprint=b"a" * 32)
    with pytest.raises(Mismatch):
        store.ledger().acquire("m1", fingerprint=b"b" * 32)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"subscriber_id": ""}, "DynamoDBLedger.subscriber_id must be"),
        ({"table": ""}, "DynamoDBLedger.table must be"),
        ({"retention_seconds": 59}, "DynamoDBLedger.retention_seconds must be from 60"),
        ({"retention_seconds": float("nan")}, "DynamoDBLedger.retention_seconds must be from 60"),
    ],
)
def test_an_argument_that_cannot_work_is_named(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidConfiguration, match=text):
        DynamoDBLedger(**{"subscriber_id": "mailing", **arguments})


class Refusing:
    """A client that some calls do not get past: they are answered as DynamoDB answers them when it refuses."""

    def __init__(self, table: str, code: str, times: int) -> None:
        self.client: Any = boto3.client(
            "dynamodb", config=Config(retries={"mode": "standard", "total_max_attempts": 2})
        )
        self.ledger = DynamoDBLedger("mailing", table=table, client=self.client)
        self.times = times
        self._body = json.dumps({"__type": f"com.amazonaws.dynamodb.v20120810#{code}", "message": "no"}).encode()
        self.client.meta.events.register("before-send.dynamodb.*", self._answer)

    def _answer(self, request: Any, **_: Any) -> Any:
        self.times -= 1
        if self.times < 0:
            return None
        headers = {"Date": time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime())}
        raw = types.SimpleNamespace(stream=lambda **_: iter([self._body]))
        return AWSResponse(request.url, 400, headers, raw)


THROTTLED = ["ProvisionedThroughputExceededException", "ThrottlingException", "RequestLimitExceeded"]


@pytest.mark.parametrize("code", THROTTLED)
def test_a_throttled_call_is_made_again(table: str, code: str) -> None:
    refusing = Refusing(table, code, times=1)
    refusing.ledger.complete(acquired(refusing.ledger, "m1"))
    assert refusing.times < 0
    refusing.client.close()


def test_who_is_throttled_all_the_time_is_told_that_it_passes(table: str) -> None:
    refusing = Refusing(table, THROTTLED[0], times=100)
    with pytest.raises(LedgerError, match=THROTTLED[0]) as caught:
        refusing.ledger.acquire("m1")
    assert not caught.value.permanent
    refusing.client.close()


def test_without_permission_the_remedy_names_all_that_a_ledger_needs(table: str) -> None:
    refusing = Refusing(table, "AccessDeniedException", times=100)
    with pytest.raises(LedgerError, match=f"grant dynamodb:GetItem and dynamodb:UpdateItem on {table}") as caught:
        refusing.ledger.acquire("m1")
    assert caught.value.permanent
    refusing.client.close()


def test_an_answer_to_somebody_else_is_not_taken_for_ours(dynamodb: Any, table: str, aws: LocalAws) -> None:
    client: Any = boto3.client("dynamodb", endpoint_url=aws.endpoint_url)
    ledger = DynamoDBLedger("mailing", table=table, client=client)
    ledger.complete(acquired(ledger, "before"))

    def others(parsed: dict[str, Any], **_: Any) -> None:
        parsed["Attributes"] = {**parsed["Attributes"], "mark": typed("another's"), "fence": typed(9_999_999_999_999)}

    client.meta.events.register("after-call.dynamodb.UpdateItem", others)
    with pytest.raises(LedgerError, match="belongs to another question"):
        ledger.acquire("m")
