"""The order of keys: at most one message of each key in a round."""

from hypothesis import given
from hypothesis import strategies as st

from txbox.relay.dispatcher import KeyOrder


def test_a_round_has_the_next_message_of_every_key_and_the_first_has_all_without_one() -> None:
    order = KeyOrder([("a", 1), (None, 2), ("b", 3), ("a", 4), (None, 5), ("a", 6), ("b", 7)])
    assert [sorted(messages) for messages in order] == [[1, 2, 3, 5], [4, 7], [6]]


def test_a_key_that_is_stopped_hands_out_no_more() -> None:
    order = KeyOrder([("a", 1), ("b", 2), ("a", 3), ("b", 4), ("a", 5)])
    handed = []
    for messages in order:
        handed.append(sorted(messages))
        order.stop("a")
    assert handed == [[1, 2], [4]]


@given(st.lists(st.tuples(st.none() | st.integers(0, 3), st.integers())))
def test_every_message_is_handed_out_once_in_the_order_of_its_key(messages: list[tuple[int | None, int]]) -> None:
    numbered = [(key, (key, number)) for number, (key, _) in enumerate(messages)]
    handed = [one for messages in KeyOrder(numbered) for one in messages]
    assert sorted(handed, key=lambda one: one[1]) == [one for _, one in numbered]
    for key in range(4):
        of_key = [number for mine, number in handed if mine == key]
        assert of_key == sorted(of_key)
