"""DynamoDB has done it, and nobody was told; or it does it twice, or late. Real connections, that are cut."""

import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest

from support.postgres.tcp_proxy import TcpProxy
from support.txbox.leases import Store, acquired
from txbox import LeaseLost, LedgerError
from txbox.leases import LeaseState
from txbox_aws.dynamodb import DynamoDBLedger
from txbox_aws.dynamodb.items import typed
from txbox_local import LocalAws

pytestmark = pytest.mark.chaos

ACQUIRE = b"if_not_exists(fence"
RENEW = b'"SET expires_at = :expires_at, asked_at'
COMPLETE = b"SET completed_at"
RELEASE = b"failures + :failed"
FORGET = b"failures = :zero"


@pytest.fixture
def proxy(aws: LocalAws) -> Iterator[TcpProxy]:
    address = urlsplit(aws.endpoint_url)
    with TcpProxy(address.hostname or "", address.port or 0) as proxy:
        yield proxy


@pytest.fixture
def behind(proxy: TcpProxy, monkeypatch: pytest.MonkeyPatch, table: str) -> Iterator[DynamoDBLedger]:
    """A ledger with a client of its own, whose connections go through the proxy."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
    ledger = DynamoDBLedger("mailing", table=table)
    ledger.check()
    yield ledger
    ledger.close()


@pytest.mark.parametrize("reaches_server", [True, False])
def test_a_lease_whose_answer_was_lost_is_ours(
    proxy: TcpProxy, behind: DynamoDBLedger, item: Callable[[], Any], reaches_server: bool
) -> None:
    proxy.lose_next(ACQUIRE, reaches_server=reaches_server)
    lease = acquired(behind, "m1", lease_seconds=20)
    assert proxy.lost == 1
    assert (lease.attempt, lease.unknown_attempts) == (1, 0)
    assert (item()["fence"], item()["attempts"]) == (lease.fence, 1)
    behind.complete(lease)


def test_one_silent_connection_does_not_lose_a_lease_of_ten_seconds(proxy: TcpProxy, behind: DynamoDBLedger) -> None:
    lease = acquired(behind, "m1", lease_seconds=30)
    assert proxy.hush()
    begun = time.monotonic()
    behind.renew(lease)
    assert time.monotonic() - begun < 10 * 2 / 3, "what is left when it is renewed"


def test_a_later_attempt_whose_answer_was_lost_is_counted_once(proxy: TcpProxy, behind: DynamoDBLedger) -> None:
    behind.release(acquired(behind, "m1"))
    proxy.lose_next(ACQUIRE, reaches_server=True)
    lease = acquired(behind, "m1")
    assert proxy.lost == 1
    assert (lease.attempt, lease.unknown_attempts) == (2, 0)


@pytest.mark.parametrize("reaches_server", [True, False])
def test_a_take_over_whose_answer_was_lost_is_ours(
    proxy: TcpProxy, behind: DynamoDBLedger, store: Store, reaches_server: bool
) -> None:
    late = acquired(store.ledger(), "m1")
    store.expire("m1")
    proxy.lose_next(ACQUIRE, reaches_server=reaches_server)
    lease = acquired(behind, "m1")
    assert proxy.lost == 1
    assert (lease.attempt, lease.unknown_attempts) == (2, 1)
    with pytest.raises(LeaseLost):
        store.ledger().complete(late)


def test_a_lease_whose_answer_was_lost_and_that_another_has_taken_over_is_not_ours(
    behind: DynamoDBLedger, store: Store, item: Callable[[], Any]
) -> None:
    """Between the call and its repetition, the lease runs out, and somebody else is quick."""
    taken: list[Any] = []

    def take(**_: Any) -> Any:
        if taken:
            return None
        taken.append(None)
        store.expire("m1")
        taken.append(acquired(store.ledger(), "m1"))
        return 0  # have boto3 repeat it, at once, as if it had not been answered

    behind._items._client().meta.events.register_first("needs-retry.dynamodb.UpdateItem", take)
    assert behind.acquire("m1").state is LeaseState.IN_FLIGHT
    assert (item()["fence"], item()["attempts"]) == (taken[1].fence, 2)


def test_a_lease_that_ran_out_before_it_was_repeated_is_counted_once(
    behind: DynamoDBLedger, store: Store, item: Callable[[], Any]
) -> None:
    """Nobody else has taken it: the one who asks again is the newest owner, of the same attempt."""
    repeated: list[Any] = []

    def repeat(**_: Any) -> Any:
        if repeated:
            return None
        repeated.append(None)
        store.expire("m1")
        return 0

    behind._items._client().meta.events.register_first("needs-retry.dynamodb.UpdateItem", repeat)
    lease = acquired(behind, "m1")
    assert (lease.attempt, item()["attempts"], item()["fence"]) == (1, 1, lease.fence)


@pytest.mark.parametrize("reaches_server", [True, False])
@pytest.mark.parametrize(("method", "marker"), [("renew", RENEW), ("complete", COMPLETE), ("release", RELEASE)])
def test_what_was_done_and_not_answered_is_done_once(
    proxy: TcpProxy,
    behind: DynamoDBLedger,
    item: Callable[[], Any],
    method: str,
    marker: bytes,
    reaches_server: bool,
) -> None:
    lease = acquired(behind, "m1")
    proxy.lose_next(marker, reaches_server=reaches_server)
    getattr(behind, method)(lease)
    assert proxy.lost == 1
    found = item()
    assert found["fence"] == lease.fence
    assert found["failures"] == (method == "release")
    assert ("completed_at" in found) == (method == "complete")
    assert ("expires_at" in found) == (method == "renew")


def test_attempts_that_are_forgotten_and_not_answered_are_forgotten(proxy: TcpProxy, behind: DynamoDBLedger) -> None:
    lease = acquired(behind, "m1")
    proxy.lose_next(FORGET, reaches_server=True)
    behind.release(lease, forget_attempts=True)
    assert proxy.lost == 1
    assert acquired(behind, "m1").attempt == 1


def test_who_gets_no_answer_at_all_is_told_that_it_may_pass(proxy: TcpProxy, behind: DynamoDBLedger) -> None:
    lease = acquired(behind, "m1")
    proxy.refuse()
    proxy.cut()
    for call in (behind.check, lambda: behind.renew(lease), lambda: behind.acquire("m2")):
        with pytest.raises(LedgerError) as caught:
            call()
        assert not caught.value.permanent
    proxy.accept()
    behind.complete(lease)


# --- calls that come twice, or late ----------------------------------------------------------------------------------


class Recorder:
    """A client that keeps its calls, to make them again as something on the way might: unchanged, and late."""

    def __init__(self, table: str) -> None:
        self.client: Any = boto3.client("dynamodb")
        self.ledger = DynamoDBLedger("mailing", table=table, client=self.client)
        self.calls: list[dict[str, Any]] = []
        self.client.meta.events.register(
            "provide-client-params.dynamodb.UpdateItem", lambda params, **_: self.calls.append(params)
        )

    def again(self, dynamodb: Any, call: int = -1) -> bool:
        """Make a call again; return whether it was carried out."""
        try:
            dynamodb.update_item(**self.calls[call])
        except dynamodb.exceptions.ConditionalCheckFailedException:
            return False
        return True


@pytest.fixture
def recorder(table: str) -> Iterator[Recorder]:
    recorder = Recorder(table)
    yield recorder
    recorder.client.close()


@pytest.mark.parametrize("end", ["complete", "release", "neither", "expired"])
def test_an_acquisition_that_comes_again_late_takes_nothing(
    dynamodb: Any, store: Store, recorder: Recorder, item: Callable[[], Any], end: str
) -> None:
    lease = acquired(recorder.ledger, "m1")
    if end == "expired":
        store.expire("m1")
    elif end != "neither":
        getattr(store.ledger(), end)(lease)
    before = item()
    assert not recorder.again(dynamodb)
    assert item() == before


@pytest.mark.parametrize("method", ["renew", "complete", "release"])
def test_what_an_owner_said_comes_too_late_once_another_has_it(
    dynamodb: Any, store: Store, table: str, recorder: Recorder, item: Callable[[], Any], method: str
) -> None:
    lease = acquired(recorder.ledger, "m1")
    getattr(recorder.ledger, method)(lease)
    if method == "complete":
        dynamodb.update_item(  # as if the completion had not arrived yet
            TableName=table,
            Key={"message_id": typed("m1"), "subscriber_id": typed("mailing")},
            UpdateExpression="REMOVE completed_at",
        )
    store.expire("m1")
    acquired(store.ledger(), "m1")
    before = item()
    assert not recorder.again(dynamodb)
    assert item() == before


def test_a_renewal_that_comes_late_does_not_undo_a_later_one(
    dynamodb: Any, recorder: Recorder, item: Callable[[], Any]
) -> None:
    lease = acquired(recorder.ledger, "m1", lease_seconds=10)
    recorder.ledger.renew(lease, lease_seconds=20)
    recorder.ledger.renew(lease, lease_seconds=500)
    before = item()
    assert not recorder.again(dynamodb, -2)
    assert item() == before
    assert lease.seconds_left > 490


def test_a_renewal_that_a_later_one_has_overtaken_leaves_it_alone(
    store: Store, recorder: Recorder, item: Callable[[], Any]
) -> None:
    """Two threads renew one lease; the one that asked first arrives last."""
    lease = acquired(recorder.ledger, "m1", lease_seconds=10)
    overtaken: list[Any] = []

    def overtake(**_: Any) -> None:
        if not overtaken:
            overtaken.append(None)
            store.ledger().renew(lease, lease_seconds=500)

    recorder.client.meta.events.register("before-call.dynamodb.UpdateItem", overtake)
    recorder.ledger.renew(lease, lease_seconds=20)
    assert overtaken
    assert lease.seconds_left > 490
    assert store.ledger().acquire("m1").seconds_left > 490


def test_a_release_that_comes_again_frees_nothing_anew(
    dynamodb: Any, recorder: Recorder, item: Callable[[], Any]
) -> None:
    lease = acquired(recorder.ledger, "m1")
    recorder.ledger.release(lease)
    assert not recorder.again(dynamodb)
    assert item()["failures"] == 1
