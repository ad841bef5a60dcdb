"""What becomes of messages that were sent, or were not."""

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from txbox.relay import OutboxMessage, Refused
from txbox.relay.settlement import BatchSettlement, FailedKey, Row, settle


def row(position: int, key: str | None = None, *, held: bool = False, attempts: int = 0) -> Row:
    return Row(1, position, held, OutboxMessage(f"m-{position}", "own:x", b"", key, attempts=attempts))


def refused(*rows: Row, final: bool = False) -> dict[int, Refused]:
    return {one.position: Refused(one.message, "no", final) for one in rows}


def settled(
    rows: list[Row],
    sent: Iterable[int],
    refusals: dict[int, Refused],
    *,
    held: Iterable[str] = (),
    max_attempts: int | None = 3,
) -> BatchSettlement:
    keys = [FailedKey(1, "own:x", key) for key in held]
    return settle(rows, set(sent), refusals, held=keys, max_attempts=max_attempts)


def positions(rows: Iterable[Row]) -> list[int]:
    return [one.position for one in rows]


def test_a_refused_message_holds_those_of_its_key_behind_it_and_no_others() -> None:
    first, second, other, keyless = row(1, "a"), row(2, "a"), row(3, "b"), row(4)
    found = settled([first, second, other, keyless], [3, 4], refused(first))
    assert found.again == [(first, Refused(first.message, "no"))]
    assert found.behind == [second]
    assert found.sent == [other, keyless]


def test_a_message_is_dead_after_its_last_attempt() -> None:
    first, last = row(1, attempts=1), row(2, attempts=2)
    found = settled([first, last], [], refused(first, last))
    assert found.again == [(first, Refused(first.message, "no"))]
    assert [one for one, _ in found.dead] == [last]
    assert settled([last], [], refused(last), max_attempts=None).again == [(last, Refused(last.message, "no"))]


def test_what_is_no_attempt_makes_no_message_dead() -> None:
    last = row(1, attempts=2)
    refusal = Refused(last.message, "the broker has failed", counted=False)
    assert settled([last], [], {1: refusal}).again == [(last, refusal)]


def test_a_final_refusal_is_the_last_one() -> None:
    one = row(1)
    assert settled([one], [], refused(one, final=True), max_attempts=None).dead


def test_behind_a_dead_message_the_key_goes_on() -> None:
    dead, next_one = row(1, "a"), row(2, "a")
    found = settled([dead, next_one], [], refused(dead, final=True))
    assert (found.left, found.behind, found.moved) == ([next_one], [], set())


def test_a_held_key_moves_on_when_its_message_is_gone() -> None:
    head, held, fresh = row(1, "a", held=True, attempts=1), row(2, "a", held=True), row(3, "a")
    key = FailedKey(1, "own:x", "a")
    sent_one = settled([head, held, fresh], [1], {}, held=["a"])
    assert (sent_one.moved, sent_one.behind) == ({key}, [fresh])
    dead_one = settled([head, held, fresh], [], refused(head, final=True), held=["a"])
    assert (dead_one.moved, dead_one.behind) == ({key}, [fresh])
    again = settled([head, held, fresh], [], refused(head), held=["a"])
    assert (again.moved, again.behind, again.again) == (set(), [fresh], [(head, Refused(head.message, "no"))])


keys = st.sampled_from([None, "a", "b"])


@given(st.lists(st.tuples(keys, st.booleans(), st.integers(0, 3)), max_size=12), st.data())
def test_every_row_has_one_end_and_nothing_of_a_key_passes_what_holds_it(
    drawn: list[tuple[str | None, bool, int]], data: st.DataObject
) -> None:
    held = {key for key, is_held, _ in drawn if is_held and key is not None}
    rows = [
        row(number, key, held=is_held and key is not None, attempts=attempts)
        for number, (key, is_held, attempts) in enumerate(drawn)
    ]
    # What a sender can come to: each key's rows are tried in their order, up to the first that is not sent.
    sent: set[int] = set()
    refusals: dict[int, Refused] = {}
    stopped = set()
    for one in rows:
        key = one.message.key
        if key is not None and (key in stopped or (key in held and not one.held)):
            continue
        end = data.draw(st.sampled_from(["sent", "refused", "final", "left"]))
        if end == "sent":
            sent.add(one.position)
        elif key is not None:
            stopped.add(key)
        if end in ("refused", "final"):
            refusals |= refused(one, final=end == "final")
    found = settled(rows, sent, refusals, held=held)
    ends = [
        *found.sent,
        *(one for one, _ in found.again),
        *(one for one, _ in found.dead),
        *found.behind,
        *found.left,
    ]
    stay_held = [one for one in rows if one not in ends]
    assert sorted(positions([*ends, *stay_held])) == positions(rows), "one end each"
    assert all(one.held for one in stay_held)
    assert set(positions(found.sent)) == sent
    for key in ("a", "b"):
        again = [one.position for one, _ in found.again if one.message.key == key]
        assert len(again) <= 1
        for one in found.left:
            if one.message.key == key and again and not one.held:
                assert one.position < again[0], "what is left is read again at once; not so behind a refused one"
