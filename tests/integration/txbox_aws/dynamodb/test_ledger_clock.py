"""A ledger in DynamoDB goes by the store's clock: hosts apart, machines that were suspended."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import boto3
import pytest

from support.txbox.leases import Store, acquired
from txbox import LedgerError
from txbox.leases import LeaseState
from txbox.leases import lease as lease_module
from txbox_aws.dynamodb import DynamoDBLedger, items
from txbox_aws.dynamodb import ledger as dynamodb_module
from txbox_local import LocalAws

DAY = 24 * 60 * 60


class Dates:
    """A client whose answers bear other times: those of a store whose clock is off by ``shift`` seconds."""

    def __init__(self, aws: LocalAws) -> None:
        self.client: Any = boto3.client("dynamodb", endpoint_url=aws.endpoint_url)
        self.shift = 0
        self.client.meta.events.register("after-call.dynamodb.*", self._change)

    def _change(self, parsed: dict[str, Any], **_: Any) -> None:
        if self.shift:
            shifted = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + self.shift))
            parsed["ResponseMetadata"]["HTTPHeaders"]["date"] = shifted


@pytest.fixture
def dates(aws: LocalAws) -> Iterator[Dates]:
    dates = Dates(aws)
    yield dates
    dates.client.close()


@pytest.fixture
def suspended(table: str, dates: Dates) -> DynamoDBLedger:
    """A ledger of a machine that was suspended: its interval clock stood still for an hour, so the store's jumps."""
    dates.shift = -3_600
    ledger = DynamoDBLedger("mailing", table=table, client=dates.client)
    ledger.check()
    dates.shift = 0
    return ledger


def milliseconds() -> int:
    """The time: this machine is the store's too."""
    return time.time_ns() // 1_000_000


def test_a_lease_is_not_taken_over_within_the_skew_of_the_hosts_clocks(store: Store, put: Callable[..., None]) -> None:
    acquired(store.ledger(), "m1")
    other = store.ledger()
    put("m1", expires_at=milliseconds() - 500)
    refused = other.acquire("m1")
    assert refused.state is LeaseState.IN_FLIGHT
    assert 0 < refused.seconds_left <= 2.5
    put("m1", expires_at=milliseconds() - 4_000)
    assert other.acquire("m1").state is LeaseState.ACQUIRED


def test_who_is_refused_learns_how_long_at_most(store: Store) -> None:
    acquired(store.ledger(), "m1", lease_seconds=20)
    assert 20 <= store.ledger().acquire("m1").seconds_left <= 24


def test_a_host_whose_clock_is_ahead_within_the_skew_changes_nothing(
    store: Store, table: str, dates: Dates, put: Callable[..., None]
) -> None:
    acquired(store.ledger(), "m1")
    dates.shift = 1
    ahead = DynamoDBLedger("mailing", table=table, client=dates.client)
    for _ in range(20):
        put("m1", expires_at=milliseconds() + 200)
        assert ahead.acquire("m1").state is LeaseState.IN_FLIGHT


def test_a_machine_that_was_suspended_writes_its_lease_anew(
    store: Store, suspended: DynamoDBLedger, item: Callable[..., Any]
) -> None:
    before = milliseconds()
    lease = acquired(suspended, "m1", lease_seconds=20)
    assert before + 20_000 <= item("m1")["expires_at"] <= milliseconds() + 22_000
    assert store.ledger().acquire("m1").state is LeaseState.IN_FLIGHT
    suspended.complete(lease)


def test_a_machine_that_was_suspended_renews_for_as_long_as_it_says(
    store: Store, table: str, dates: Dates, item: Callable[..., Any]
) -> None:
    dates.shift = -3_600
    suspended = DynamoDBLedger("mailing", table=table, client=dates.client)
    lease = acquired(suspended, "m1", lease_seconds=20)
    dates.shift = 0
    before = milliseconds()
    suspended.renew(lease)
    assert before + 20_000 <= item("m1")["expires_at"] <= milliseconds() + 22_000


def test_a_lease_that_was_written_too_short_and_was_taken_over_is_not_given_out(
    store: Store, suspended: DynamoDBLedger, dates: Dates
) -> None:
    """In the moment between its answer and its being written anew, somebody else takes it."""
    other = store.ledger()
    other.check()
    taken: list[Any] = []

    def take(**_: Any) -> None:
        if not taken:
            taken.append(None)
            taken.append(other.acquire("m1"))

    dates.client.meta.events.register("after-call.dynamodb.UpdateItem", take)
    refused = suspended.acquire("m1", lease_seconds=20)
    assert refused.state is LeaseState.IN_FLIGHT
    assert taken[1].state is LeaseState.ACQUIRED
    other.complete(taken[1].lease)


@pytest.mark.parametrize("moment", ["before it is sent", "after it is sent"])
def test_a_lease_reckoned_before_another_thread_learns_of_the_suspension_is_written_anew(
    table: str, dates: Dates, item: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    dates.shift = -3_600
    suspended = DynamoDBLedger("mailing", table=table, client=dates.client)
    suspended.check()
    learned: list[int] = []

    def learn(**_: Any) -> Any:
        if not learned:
            learned.append(milliseconds())
            dates.shift = 0
            suspended.check()
        return dates.client

    if moment == "before it is sent":
        monkeypatch.setattr(suspended._items, "_client", learn)
    else:
        dates.client.meta.events.register("before-send.dynamodb.UpdateItem", lambda **_: learn() and None)
    acquired(suspended, "m1", lease_seconds=20)
    assert learned[0] + 20_000 <= item("m1")["expires_at"]


def test_clocks_that_contradict_each_other_all_the_time_are_an_error(table: str, dates: Dates) -> None:
    ledger = DynamoDBLedger("mailing", table=table, client=dates.client)
    lease = acquired(ledger, "m1")

    def jump(**_: Any) -> None:
        dates.shift += 10_000

    dates.client.meta.events.register("before-call.dynamodb.UpdateItem", jump)
    with pytest.raises(LedgerError, match="contradict each other again and again") as caught:
        ledger.renew(lease)
    assert not caught.value.permanent


@pytest.mark.parametrize("idle", [3_600, DAY, 30 * DAY])
def test_a_ledger_that_was_idle_asks_for_the_time_first(
    aws: LocalAws, table: str, item: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, idle: int
) -> None:
    dates = Dates(aws)
    ledger = DynamoDBLedger("mailing", table=table, client=dates.client)
    ledger.complete(acquired(ledger, "before"))
    # Time passes, for both sides.
    real = lease_module.elapsed
    for module in (dynamodb_module, items):
        monkeypatch.setattr(module, "elapsed", lambda: real() + idle)
    dates.shift = idle
    acquired(ledger, "m", lease_seconds=30)
    assert 29 <= item("m")["expires_at"] / 1000 - time.time() - idle <= 33
