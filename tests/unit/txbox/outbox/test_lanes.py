"""Lanes: a function that must never change, for messages of one key would be in two of them."""

from hypothesis import given
from hypothesis import strategies as st

from txbox.outbox.lanes import LANES_PER_DESTINATION, destination_of, lane_of, lanes_of


def test_lanes_are_what_they_always_were() -> None:
    assert lane_of("kafka:purchases", "customer 7", "m-1") == 1_197_260_790_379_580_805
    assert lane_of("kafka:purchases", None, "m-1") == 1_197_260_790_379_580_852
    assert (
        lane_of("https://sqs.eu-central-1.amazonaws.com/123456789012/purchases", "ключ", "m-1")
        == 7_112_812_855_234_035_546
    )


@given(st.text(min_size=1), st.none() | st.text(min_size=1), st.text(min_size=1))
def test_a_lane_is_a_positive_bigint_of_its_destination(destination: str, key: str | None, message_id: str) -> None:
    lane = lane_of(destination, key, message_id)
    assert 0 <= lane < 2**63
    assert destination_of(lane) == destination_of(lane_of(destination, "another", "m"))


@given(st.text(min_size=1), st.text(min_size=1), st.text(min_size=1))
def test_all_messages_of_a_key_are_in_one_lane(key: str, one: str, other: str) -> None:
    assert lane_of("own:x", key, one) == lane_of("own:x", key, other)


def test_keys_and_keyless_messages_are_spread_over_all_lanes() -> None:
    keyed = {lane_of("own:x", f"customer {number}", "m") for number in range(2_000)}
    keyless = {lane_of("own:x", None, f"m-{number}") for number in range(2_000)}
    assert keyed == keyless
    assert len(keyed) == LANES_PER_DESTINATION


def test_the_lanes_of_an_inbox_are_negative_and_those_of_all_else_are_not() -> None:
    for name in map(str, range(500)):
        assert lane_of(f"inbox:{name}", "key", "m") < 0
        assert lane_of(f"own:{name}", "key", "m") >= 0
        assert lane_of(f"inbox:{name}", "key", "m") in lanes_of(f"inbox:{name}")
        assert destination_of(lanes_of(f"inbox:{name}")[0]) == destination_of(lanes_of(f"inbox:{name}")[-1])
