"""What a lease knows of itself, and what a record means; without any store."""

import os

import pytest

from txbox import LeaseLost
from txbox.leases import Lease
from txbox.leases.lease import elapsed, owner


def lease(*, seconds: float = 60, ago: float = 0) -> Lease:
    return Lease(
        "mailing", "m", fence=7, attempt=2, unknown_attempts=1, lease_seconds=seconds, asked_at=elapsed() - ago
    )


def test_a_lease_counts_from_when_it_was_asked_for() -> None:
    one = lease(seconds=60, ago=20)
    assert 39 < one.seconds_left <= 40
    assert one.lease_seconds == 60
    one.ensure()


def test_a_lease_that_has_run_out_may_be_lost() -> None:
    one = lease(seconds=60, ago=61)
    assert one.seconds_left == 0
    assert not one.lost
    with pytest.raises(LeaseLost) as caught:
        one.ensure()
    assert (caught.value.subscriber_id, caught.value.message_id, caught.value.fence) == ("mailing", "m", 7)
    assert not one.lost, "it may be lost; the ledger has not said so"


def test_a_renewal_counts_from_when_it_was_asked_for_too() -> None:
    one = lease(seconds=60, ago=61)
    one.mark_renewed(30, elapsed() - 10)
    assert one.lease_seconds == 30
    assert 19 < one.seconds_left <= 20


def test_a_lease_shows_who_and_what_but_no_times() -> None:
    assert repr(lease()) == "Lease('mailing', 'm', fence=7, attempt=2)"


def test_an_owner_is_a_host_and_a_process() -> None:
    assert owner().endswith(f" {os.getpid()}")
