"""The order within a group: nothing overtakes a message that has to come again."""

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from support.workers.business import Business
from support.workers.handlers import failing_first
from support.workers.memory_worker import delivery, make, process
from txbox import Inbox, Message, Outcome
from txbox_workers.memory_source import MemorySource


def test_what_follows_a_failure_in_its_group_is_handed_back(engine: Engine, business: Business) -> None:
    worker = make(MemorySource(), engine, failing_first("a2"))
    outcomes = process(
        worker,
        delivery("a1", group="a"),
        delivery("b1", group="b"),
        delivery("a2", group="a"),
        delivery("a3", group="a"),
        delivery("b2", group="b"),
    )
    assert dict(outcomes) == {
        "a1-1": Outcome.PROCESSED,
        "b1-1": Outcome.PROCESSED,
        "a2-1": Outcome.FAILED,
        "a3-1": Outcome.IN_FLIGHT,
        "b2-1": Outcome.PROCESSED,
    }
    assert business.order() == ["a1", "b1", "b2"]


def test_in_the_parts_of_a_large_batch_nothing_overtakes_a_failure_of_its_group(
    engine: Engine, business: Business
) -> None:
    names = [f"{group}{number:02}" for number in range(20) for group in "abc"]
    worker = make(MemorySource(), engine, failing_first("b04", times=3))  # the third time alone
    outcomes = dict(process(worker, *(delivery(name, group=name[0]) for name in names)))
    late = [name for name in names if name > "b04" and name[0] == "b"]
    assert [name for name in names if outcomes[f"{name}-1"] is Outcome.IN_FLIGHT] == late
    assert outcomes["b04-1"] is Outcome.FAILED
    assert business.order() == [name for name in names if name not in ("b04", *late)]
    assert len(business.rows("SELECT DISTINCT xmin::text FROM effect")) < 20, "most of them by several"


def test_once_it_is_stopping_no_part_is_begun(engine: Engine, business: Business) -> None:
    runs: list[str] = []

    def handle(session: Session, message: Message) -> None:
        runs.append(message.id)
        worker._activity.halt()
        raise ValueError("no")

    worker = make(MemorySource(), engine, handle)
    outcomes = process(worker, *(delivery(f"m{number}") for number in range(30)))
    assert runs == ["m0"]
    assert {outcome for _, outcome in outcomes} == {Outcome.IN_FLIGHT}


def test_repeats_of_a_group_s_messages_do_not_overtake_either(engine: Engine, business: Business) -> None:
    """The producer has sent each message twice, in another order the second time."""
    worker = make(MemorySource(), engine, failing_first("m1"))
    process(
        worker,
        *(delivery(id_, group="g") for id_ in ("m1", "m2", "m3")),
        *(delivery(id_, group="g", receipt=f"again-{id_}") for id_ in ("m3", "m2", "m1")),
    )
    assert business.order() == []
    process(worker, *(delivery(id_, group="g", receive_count=2) for id_ in ("m1", "m2", "m3")))
    assert business.order() == ["m1", "m2", "m3"]


def test_an_id_that_comes_in_two_groups_breaks_the_order_of_neither(engine: Engine, business: Business) -> None:
    worker = make(MemorySource(), engine, failing_first("x"))
    process(
        worker,
        delivery("x", group="a", receipt="a-x"),
        delivery("x", group="b", receipt="b-x"),
        delivery("y", group="b", receipt="b-y"),
    )
    assert business.order() == []


def test_a_message_in_flight_blocks_its_group(engine: Engine, business: Business) -> None:
    worker = make(MemorySource(), engine)
    with engine.connect() as elsewhere:
        Inbox("billing").record(elsewhere, "m1")
        process(worker, *(delivery(id_, group="g") for id_ in ("m1", "m2")))
        elsewhere.rollback()
    assert business.order() == []
