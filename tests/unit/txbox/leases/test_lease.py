"""What a lease knows of itself, and what a record means; without any store."""

import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txbox import InvalidConfiguration, LeaseLost, Mismatch
from txbox.leases import Acquisition, Lease, LeaseState
from txbox.leases.lease import MAX_LEASE_SECONDS, LeaseRecord, acquisition_from, elapsed, owner, valid_lease_seconds


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


def test_what_was_lost_is_over_however_much_time_was_left() -> None:
    one = lease()
    error = one.mark_lost()
    assert (error.message_id, error.fence) == ("m", 7)
    assert one.lost
    assert one.seconds_left == 0
    with pytest.raises(LeaseLost):
        one.ensure()


def test_a_lease_shows_who_and_what_but_no_times() -> None:
    assert repr(lease()) == "Lease('mailing', 'm', fence=7, attempt=2)"


RECORDS = st.builds(
    LeaseRecord,
    completed=st.booleans(),
    seconds_left=st.none() | st.floats(-100, 100),
    result=st.none() | st.binary(max_size=3),
    fingerprint=st.sampled_from([None, b"one", b"other"]),
)


@given(record=RECORDS, fingerprint=st.sampled_from([None, b"one"]))
def test_a_record_is_completed_in_flight_or_to_be_asked_for_again(
    record: LeaseRecord, fingerprint: bytes | None
) -> None:
    if fingerprint == b"one" and record.fingerprint == b"other":
        with pytest.raises(Mismatch):
            acquisition_from(record, "mailing", "m", fingerprint)
        return
    acquisition = acquisition_from(record, "mailing", "m", fingerprint)
    if record.completed:
        assert acquisition == Acquisition(LeaseState.COMPLETED, result=record.result)
    elif record.seconds_left is not None and record.seconds_left > 0:
        assert acquisition == Acquisition(LeaseState.IN_FLIGHT, seconds_left=record.seconds_left)
    else:
        assert acquisition is None


@pytest.mark.parametrize("seconds", [0.001, 1, 30, MAX_LEASE_SECONDS])
def test_a_lease_may_be_this_long(seconds: float) -> None:
    assert valid_lease_seconds(seconds) == seconds
    assert isinstance(valid_lease_seconds(seconds), float)


@pytest.mark.parametrize("seconds", [0, 0.0009, -1, MAX_LEASE_SECONDS + 1, math.inf, -math.inf, math.nan])
def test_a_lease_may_not_be_this_long(seconds: float) -> None:
    with pytest.raises(InvalidConfiguration, match=r"lease_seconds must be from 0\.001 to 604800"):
        valid_lease_seconds(seconds)


def test_the_clock_of_intervals_goes_forward() -> None:
    readings = [elapsed() for _ in range(1_000)]
    assert readings == sorted(readings)


def test_an_owner_is_a_host_and_a_process() -> None:
    assert owner().endswith(f" {os.getpid()}")
