"""In which order a batch is handled, by what its messages lock."""

import random
from typing import Any

import pytest

from txbox import Message
from txbox_workers.delivery import Delivery
from txbox_workers.handlers import MessageArguments
from txbox_workers.processing.lock_order import LockOrder


def delivery(number: int, locks: Any, group: str | None = None) -> Delivery:
    message = Message(f"m{number}", repr(locks).encode())
    return Delivery(message, receipt=str(number), group=group)


def locks_of(message: Message) -> Any:
    return eval(message.body)


def in_order(*deliveries: Delivery) -> list[Any]:
    order = LockOrder(locks_of, MessageArguments(), lambda one: one.group)
    return [locks_of(one.message) for one in order.sorted(deliveries, {})]


@pytest.mark.parametrize(
    ("locks", "expected"),
    [
        ([3, 1, 2], [1, 2, 3]),
        ([9, 10], [9, 10]),
        (["b", "a"], ["a", "b"]),
        ([(2, 9), (1, 5), (2, 3), 2], [(1, 5), 2, (2, 3), (2, 9)]),
        ([[7, 1], {3}, ()], [(), [7, 1], {3}]),
        (["a", 1, "0"], [1, "0", "a"]),
        ([None, None], [None, None]),
    ],
    ids=str,
)
def test_they_come_in_the_order_of_their_locks(locks: list[Any], expected: list[Any]) -> None:
    assert in_order(*(delivery(number, each) for number, each in enumerate(locks))) == expected


def test_those_of_a_group_and_those_of_a_row_stay_in_order() -> None:
    chance = random.Random(5)
    order = LockOrder(locks_of, MessageArguments(), lambda one: one.group)
    for _ in range(200):
        deliveries = [delivery(n, chance.randrange(6), chance.choice([None, None, "a", "b"])) for n in range(12)]
        ordered = order.sorted(deliveries, {})
        assert {one.receipt for one in ordered} == {one.receipt for one in deliveries}
        of_no_group = [one for one in ordered if one.group is None]
        for some in (
            *([one for one in ordered if one.group == group] for group in "ab"),
            *([one for one in of_no_group if locks_of(one.message) == row] for row in range(6)),
        ):
            assert [int(one.receipt) for one in some] == sorted(int(one.receipt) for one in some)
        rows = [locks_of(one.message) for one in of_no_group]
        assert rows == sorted(rows)


def test_a_message_alone_is_asked_too() -> None:
    """What is wrong with the host's function shows wherever it is used."""
    with pytest.raises(ZeroDivisionError):
        LockOrder(lambda _: 1 / 0, MessageArguments(), lambda _: None).sorted([delivery(1, 1)], {})
