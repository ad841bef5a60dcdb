"""The clock of a server, compared with ours."""

import pytest

from txbox.leases.server_clock import DRIFT, TOLERANCE_SECONDS, ServerClock

HOUR = 3600.0
LEASE = 30.0


def observed(clock: ServerClock, server: float, at: float, trip: float = 0.0) -> float:
    return clock.observe(server, sent=at, received=at + trip, hold_seconds=LEASE)


def test_nothing_is_known_before_the_first_answer() -> None:
    assert ServerClock().latest(5.0) is None


def test_a_clock_that_goes_as_ours_was_not_set() -> None:
    clock = ServerClock()
    for at in (0.0, 1.0, 5_000.0, 90_000.0):
        assert observed(clock, 1_000_000 + at, at) == 0
        assert clock.latest(at) == pytest.approx(1_000_000 + at, abs=TOLERANCE_SECONDS + 0.1)


@pytest.mark.parametrize("rate", [0.9995, 1.0005])
def test_a_clock_that_is_being_adjusted_was_not_set(rate: float) -> None:
    clock = ServerClock()
    observed(clock, 1_000.0, 0.0)
    assert clock.latest(90_000.0) == pytest.approx(1_000 + 90_000 * (1 + DRIFT), abs=TOLERANCE_SECONDS + 0.1)
    assert observed(clock, 1_000 + 90_000 * rate, 90_000.0) == 0


@pytest.mark.parametrize("server", [100.0, 108.0, 118.0])
def test_an_answer_that_took_long_says_little(server: float) -> None:
    clock = ServerClock()
    observed(clock, 100.0, 0.0, trip=10.0)
    assert observed(clock, server, 1.0, trip=18.0) == 0


def test_an_answer_that_was_overtaken_by_a_later_one_changes_nothing() -> None:
    clock = ServerClock()
    observed(clock, 1_000.0, 0.0)
    observed(clock, 1_010.0, 10.0)
    assert clock.observe(1_005.0, sent=5.0, received=11.0, hold_seconds=LEASE) == 0
    assert clock.latest(10.0) == pytest.approx(1_010, abs=TOLERANCE_SECONDS + 0.1)


def test_a_clock_that_was_set_forward_is_believed_after_a_lease() -> None:
    clock = ServerClock()
    observed(clock, 1_000.0, 0.0)
    assert observed(clock, 1_001.0 + HOUR, 1.0) == pytest.approx(HOUR)
    for at in (2.0, 30.0):
        assert clock.latest(at) == pytest.approx(1_000 + at, abs=TOLERANCE_SECONDS + 0.1)
        assert observed(clock, 1_000 + HOUR + at, at) == 0, "that is known"
    assert observed(clock, 1_032.0 + HOUR, 32.0) == 0
    assert clock.latest(33.0) == pytest.approx(1_033 + HOUR, abs=TOLERANCE_SECONDS + 0.1)


def test_a_clock_that_is_set_right_again_was_never_wrong() -> None:
    clock = ServerClock()
    observed(clock, 1_000.0, 0.0)
    observed(clock, 1_001.0 + HOUR, 1.0)
    assert observed(clock, 1_002.0, 2.0) == 0
    assert observed(clock, 1_003.0 + HOUR, 3.0) == pytest.approx(HOUR), "and this is another step"


def test_a_clock_that_was_set_back_is_believed_at_once() -> None:
    clock = ServerClock()
    observed(clock, 10_000.0, 0.0)
    assert observed(clock, 10_001.0 - HOUR, 1.0) == pytest.approx(-HOUR)
    assert clock.latest(2.0) == pytest.approx(10_002 - HOUR, abs=TOLERANCE_SECONDS + 0.1)
    assert observed(clock, 10_002.0 - HOUR, 2.0) == 0
