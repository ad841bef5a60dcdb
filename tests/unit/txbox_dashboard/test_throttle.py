"""Wrong tokens are bounded, for each address and in total, in a memory that does not grow."""

from txbox_dashboard.access import GUESSES, GUESSES_IN_ALL, WINDOW_SECONDS, Throttle


class Clock:
    """A time that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_an_address_is_throttled_after_its_guesses_and_others_are_not() -> None:
    clock = Clock()
    throttle = Throttle(clock)
    for _ in range(GUESSES):
        assert throttle.wait_seconds("192.0.2.1") == 0
        throttle.note("192.0.2.1")
        clock.now += 1
    assert throttle.wait_seconds("192.0.2.1") == WINDOW_SECONDS - GUESSES
    assert throttle.wait_seconds("192.0.2.2") == 0


def test_a_loop_of_guesses_gets_no_more_than_its_share_however_long_it_runs() -> None:
    clock, heard = Clock(), 0
    throttle = Throttle(clock)
    for _ in range(20_000):
        if not throttle.wait_seconds("192.0.2.1"):
            throttle.note("192.0.2.1")
            heard += 1
        clock.now += WINDOW_SECONDS / 1000
    assert heard == GUESSES * 20


def test_many_addresses_are_throttled_together_in_constant_memory() -> None:
    clock, heard = Clock(), 0
    throttle = Throttle(clock)
    for number in range(5000):
        address = f"198.51.{number // 250}.{number % 250}"
        if not throttle.wait_seconds(address):
            throttle.note(address)
            heard += 1
    assert heard == GUESSES_IN_ALL
    assert len(throttle._wrong) == GUESSES_IN_ALL
    assert throttle.wait_seconds("203.0.113.1") == WINDOW_SECONDS
    clock.now += WINDOW_SECONDS
    assert throttle.wait_seconds("203.0.113.1") == 0
    assert len(throttle._wrong) == 0


def test_the_addresses_of_one_network_of_ipv6_are_one_guesser() -> None:
    throttle = Throttle(Clock())
    for number in range(GUESSES):
        throttle.note(f"2001:db8::{number:x}")
    assert throttle.wait_seconds("2001:db8::ffff:1") > 0
    assert throttle.wait_seconds("2001:db8:0:1::1") == 0
    for _ in range(GUESSES):
        throttle.note("::ffff:192.0.2.1")
    assert throttle.wait_seconds("192.0.2.1") > 0
    assert throttle.wait_seconds("::ffff:192.0.2.2") == 0
    for _ in range(GUESSES):
        throttle.note(None)
    assert throttle.wait_seconds("unix:") > 0, "what is no address is one guesser"
