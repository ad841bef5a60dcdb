"""The store's clock: whatever the delays, and however its times are cut off, the true time is between the bounds."""

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txbox import LedgerError
from txbox_aws.dynamodb.store_clock import DRIFT, SKEW_SECONDS, StoreClock, response_time


@dataclass(frozen=True)
class Call:
    """A pause, then a request, then an answer; the store looks at its clock in between. In seconds of true time."""

    pause: float
    there: float
    back: float
    skew: float


def seconds(longest: float) -> st.SearchStrategy[float]:
    return st.floats(0, longest, allow_nan=False, width=32)


CALLS = st.lists(
    st.builds(Call, pause=seconds(3_600), there=seconds(20), back=seconds(20), skew=seconds(SKEW_SECONDS)), min_size=1
)


@given(
    offset=st.floats(1e9, 2e9),
    rate=st.floats(1 - DRIFT / 2, 1 + DRIFT / 2),
    calls=CALLS,
    after=seconds(100_000),
)
def test_the_true_time_is_between_the_bounds(offset: float, rate: float, calls: list[Call], after: float) -> None:
    """Our clock began at 0, somewhere, and runs a little too fast or too slow; hosts are at most SKEW_SECONDS apart."""
    clock, now = StoreClock(), 0.0
    skews = [call.skew for call in calls]
    for call in calls:
        sent = now + call.pause
        asked = sent + call.there
        now = asked + call.back
        assert clock.observe(math.floor(offset + asked + call.skew), sent=sent * rate, received=now * rate)
        for at in (now, now + after):
            rounding = 1e-5
            assert clock.earliest(at * rate) <= offset + at + max(skews) + rounding
            assert clock.latest(at * rate) >= offset + at + min(skews) - rounding


@given(calls=CALLS, lease=seconds(1_000))
def test_a_lease_is_never_taken_over_before_its_time(calls: list[Call], lease: float) -> None:
    """One client writes a lease, another looks at it; each has asked hosts of its own."""
    offset, writer, other, now = 1.7e9, StoreClock(), StoreClock(), 0.0
    ends = written = None
    for number, call in enumerate(calls):
        clock = writer if number % 2 == 0 else other
        sent = now + call.pause
        asked = sent + call.there
        now = asked + call.back
        clock.observe(math.floor(offset + asked + call.skew), sent=sent, received=now)
        if ends is None:
            written, ends = now, writer.latest(now) + lease
        elif clock is other and ends <= other.earliest(now) - SKEW_SECONDS:
            assert written is not None
            assert now - written >= lease - 1e-5


def test_one_answer_tells_the_time_within_a_second_and_the_round_trip() -> None:
    clock = StoreClock()
    clock.observe(1_000, sent=50.0, received=50.25)
    assert clock.earliest(50.25) == pytest.approx(1_000, abs=0.001)
    assert clock.latest(50.25) == pytest.approx(1_001.25, abs=0.001)
    assert clock.earliest(60.25) == pytest.approx(1_010, abs=0.011)
    assert clock.latest(60.25) == pytest.approx(1_011.25, abs=0.011)


def test_the_store_has_to_tell_its_time_first() -> None:
    clock = StoreClock()
    assert not clock.is_precise(0.0)
    for bound in (clock.earliest, clock.latest):
        with pytest.raises(LookupError, match="has not answered yet"):
            bound(0.0)


def test_many_answers_make_the_time_known_within_the_round_trip() -> None:
    clock, offset = StoreClock(), 1_000.3
    for tenth in range(30):
        at = tenth / 10
        clock.observe(math.floor(at + offset), sent=at - 0.001, received=at + 0.001)
    assert clock.earliest(3.0) <= 3.0 + offset <= clock.latest(3.0)
    assert clock.latest(3.0) - clock.earliest(3.0) < 0.11


def test_what_was_known_ages() -> None:
    clock = StoreClock()
    clock.observe(1_000, sent=0.0, received=0.0)
    assert clock.latest(3_600.0) - clock.earliest(3_600.0) == pytest.approx(1 + 2 * DRIFT * 3_600)
    assert clock.is_precise(400.0)
    assert not clock.is_precise(600.0), "it has to be asked again"


@pytest.mark.parametrize("jump", [3_600, -3_600, 10])
def test_a_contradiction_is_told_and_both_are_believed_until_the_next_answer(jump: int) -> None:
    clock = StoreClock()
    assert clock.observe(1_000, sent=0.0, received=0.1)
    assert not clock.observe(1_000 + jump, sent=0.2, received=0.3)
    assert clock.earliest(0.3) == pytest.approx(min(1_000, 1_000 + jump), abs=0.5)
    assert clock.latest(0.3) == pytest.approx(1_001 + max(0, jump), abs=0.5)
    assert clock.observe(1_000 + jump, sent=0.4, received=0.5)
    assert clock.earliest(0.5) == pytest.approx(1_000 + jump, abs=0.5)
    assert clock.latest(0.5) == pytest.approx(1_001 + jump, abs=0.5)


def test_an_answer_to_a_request_from_before_a_contradiction_changes_nothing() -> None:
    """A thread's answer that was under way while the machine was suspended measures nothing."""
    clock = StoreClock()
    clock.observe(1_000, sent=0.0, received=0.1)
    assert not clock.observe(4_600, sent=0.3, received=0.4)
    assert not clock.observe(1_000, sent=0.2, received=0.5)
    assert clock.latest(0.5) >= 4_600


@pytest.mark.parametrize("apart", [1, 2])
def test_hosts_that_are_a_little_apart_are_no_contradiction(apart: int) -> None:
    """Two whole seconds apart, as cut off, may be hardly more than one."""
    clock = StoreClock()
    assert clock.observe(1_000, sent=0.0, received=0.0)
    assert clock.observe(1_000 + apart, sent=0.0, received=0.0)


def response(**headers: str) -> dict[str, object]:
    return {"ResponseMetadata": {"HTTPHeaders": headers}}


def test_the_header_of_http_is_read() -> None:
    assert response_time(response(date="Sun, 06 Nov 1994 08:49:37 GMT")) == 784_111_777


@pytest.mark.parametrize("headers", [{}, {"date": ""}, {"date": "yesterday"}, {"date": "1994-11-06T08:49:37Z"}])
def test_what_is_no_date_is_refused(headers: dict[str, str]) -> None:
    with pytest.raises(LedgerError, match=r"has no time in it .*its Date header is") as caught:
        response_time(response(**headers))
    assert caught.value.permanent
