"""How messages are cut into calls."""

from hypothesis import given
from hypothesis import strategies as st

from support.aws.outgoing import QUEUE, outgoing
from txbox.relay import OutboxMessage
from txbox_aws.publishers.calls import Entry, PublishCall, calls


def entry(size: int, destination: str = QUEUE) -> Entry:
    return Entry(OutboxMessage("m", destination, b""), {}, size)


def sizes(cut: list[PublishCall]) -> list[list[int]]:
    return [[one.size for one in call.entries] for call in cut]


def test_twenty_five_messages_are_three_calls() -> None:
    assert [len(call.entries) for call in calls([entry(1)] * 25, 100)] == [10, 10, 5]


def test_a_call_holds_what_its_bytes_allow_and_not_a_byte_more() -> None:
    assert sizes(calls([entry(50), entry(50), entry(1), entry(99), entry(2)], 100)) == [[50, 50], [1, 99], [2]]


def test_destinations_take_turns() -> None:
    cut = calls([entry(1, "a")] * 30 + [entry(1, "b")] * 20 + [entry(1, "c")], 100)
    assert [call.destination for call in cut] == ["a", "b", "c", "a", "b", "a"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 120)), max_size=60))
def test_every_entry_is_in_one_call_in_order_and_no_call_is_too_large(wanted: list[tuple[str, int]]) -> None:
    entries = [Entry(outgoing(where, str(number))[0], {}, size) for number, (where, size) in enumerate(wanted)]
    cut = calls(entries, 100)
    for where in "abc":
        there = [one for call in cut if call.destination == where for one in call.entries]
        assert there == [one for one in entries if one.message.destination == where]
    for call in cut:
        assert 1 <= len(call.entries) <= 10
        assert len(call.entries) == 1 or sum(one.size for one in call.entries) <= 100
