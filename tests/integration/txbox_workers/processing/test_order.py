"""Order over dead letters: what is parked holds its key, and what follows is parked behind it."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import Connection, Engine

from support.postgres.statements import run
from support.workers.business import Business
from support.workers.memory_worker import delivery, process
from support.workers.ordered import failing, in_group, ordered, outcomes, park_m1, waiting, with_key
from txbox import DeadLetter, DeadLetters, Inbox, InvalidConfiguration, MalformedMessage, Message, Outcome
from txbox.dead_letters.order import MAX_KEY_BYTES, order_key
from txbox_workers.delivery import Delivery


@pytest.mark.parametrize("max_attempts", [1, 10])
@pytest.mark.parametrize("make_delivery", [in_group, with_key])
def test_what_follows_a_dead_letter_in_its_key_is_parked_behind_it_in_order(
    leveled: Engine, business: Business, make_delivery: Callable[..., Delivery], max_attempts: int
) -> None:
    park_m1(leveled, make_delivery)
    worker = ordered(leveled, max_attempts=max_attempts)
    found = outcomes(worker, *(make_delivery(id_) for id_ in ("m2", "m3")), make_delivery("n1", "other"), delivery("x"))
    assert found == {"m2": Outcome.DEAD, "m3": Outcome.DEAD, "n1": Outcome.PROCESSED, "x": Outcome.PROCESSED}
    assert outcomes(worker, make_delivery("m4")) == {"m4": Outcome.DEAD}, "a batch of its own"
    assert waiting(leveled) == {"m1": "failed", "m2": "behind", "m3": "behind", "m4": "behind"}
    assert business.order() == ["n1", "x"]
    assert business.recorded() == {"n1", "x"}
    (m2,) = (letter for letter in DeadLetters(leveled).list() if letter.message_id == "m2")
    assert (m2.attempts, m2.order_key) == (0, "g")
    assert "dead letter 1" in m2.error
    assert business.failing() == {}


def test_without_the_option_a_key_goes_on(engine: Engine, business: Business) -> None:
    worker = ordered(engine, failing("m1"), ordered=False)
    outcomes(worker, in_group("m1"), in_group("m2"))
    assert business.order() == ["m2"]
    (letter,) = DeadLetters(engine).list()
    assert (letter.order_key, letter.order_position) == (None, None)


def test_a_message_without_a_group_and_a_key_is_told_of_once(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records if "ordered=True" in record.getMessage()]

    worker = ordered(engine)
    unread = replace(delivery("unreadable"), problem=MalformedMessage("no"))
    outcomes(worker, in_group("m1"), with_key("m2"), unread)
    assert told() == []
    outcomes(worker, in_group("m3"), delivery("x1"), delivery("x2"))
    outcomes(worker, delivery("x3"))
    (said,) = told()
    assert said.startswith("billing: ordered=True, but x1 came without a FIFO group and without a key header")
    caplog.clear()
    outcomes(ordered(engine, ordered=False), delivery("x4"))
    assert told() == []


def test_another_subscriber_is_not_held(engine: Engine, business: Business) -> None:
    park_m1(engine)
    assert outcomes(ordered(engine, inbox=Inbox("audit")), in_group("m2")) == {"m2": Outcome.PROCESSED}


def test_what_was_processed_before_is_a_duplicate_and_not_parked(engine: Engine, business: Business) -> None:
    worker = ordered(engine, failing("m1"))
    outcomes(worker, in_group("m0"), in_group("m1"))
    assert outcomes(worker, in_group("m0"), in_group("m1")) == {"m0": Outcome.DUPLICATE, "m1": Outcome.DEAD}
    assert waiting(engine) == {"m1": "failed"}


def test_a_redelivery_is_parked_behind_with_the_attempts_it_had(engine: Engine, business: Business) -> None:
    """On a standard queue another message of its key may fail for the last time meanwhile."""
    worker = ordered(engine, failing("m1"), max_attempts=3)
    assert outcomes(worker, with_key("m1")) == {"m1": Outcome.FAILED}
    assert outcomes(ordered(engine, failing("m2")), with_key("m2")) == {"m2": Outcome.DEAD}
    assert outcomes(worker, with_key("m1", receive_count=2)) == {"m1": Outcome.DEAD}
    assert {each.message_id: each.attempts for each in DeadLetters(engine).list()} == {"m2": 1, "m1": 1}
    assert business.failing() == {}


def test_a_key_of_a_failed_message_waits_in_its_batch_and_comes_again_after_it(
    engine: Engine, business: Business
) -> None:
    worker = ordered(engine, failing("m1"), max_attempts=3)
    deliveries = [with_key("m1"), with_key("m2"), with_key("n1", "other"), with_key("m3")]
    settled = [s for several in worker._processor.process(deliveries) for s in several]
    delays = {s.delivery.message.id: s.delay_seconds for s in settled if not s.outcome.acked}
    assert delays.keys() == {"m1", "m2", "m3"}
    assert delays["m1"] == delays["m2"] == delays["m3"] > 0
    assert business.order() == ["n1"]


def test_a_mismatch_holds_nothing(engine: Engine, business: Business) -> None:
    worker = ordered(engine, inbox=Inbox("billing", fingerprint=True))
    outcomes(worker, with_key("m1"))
    other = Message("m1", b"another body", {"key": "g"})
    assert process(worker, Delivery(other, "again", body=b"another body")) == [("again", Outcome.MISMATCH)]
    assert outcomes(worker, with_key("m2")) == {"m2": Outcome.PROCESSED}


def test_an_expired_message_holds_what_follows_it_in_its_batch(leveled: Engine, business: Business) -> None:
    run(leveled, "INSERT INTO inbox_horizon (subscriber_id, horizon) VALUES ('billing', now())")
    old, new = (
        replace(in_group(id_), message=replace(in_group(id_).message, sent_at=at))
        for id_, at in (("m1", datetime(2020, 1, 1, tzinfo=UTC)), ("m2", datetime(2999, 1, 1, tzinfo=UTC)))
    )
    found = outcomes(ordered(leveled, max_attempts=10), old, new)
    assert found == {"m1": Outcome.EXPIRED, "m2": Outcome.DEAD}
    assert waiting(leveled) == {"m1": "expired", "m2": "behind"}


def test_what_cannot_keep_an_order_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidConfiguration, match="ordered needs max_attempts"):
        ordered(engine, max_attempts=None)


def test_a_key_is_the_group_or_else_what_the_headers_name_and_fits_an_index() -> None:
    assert order_key("g", {"key": "k"}) == "g"
    assert order_key(None, {"key": "k", "eventbridge-key": "e"}) == "k"
    assert order_key(None, {"eventbridge-key": "e"}) == "e"
    assert order_key(None, {}) is None
    assert order_key(None, {"key": "a\0b"}) == "a�b"
    long = "ü" * MAX_KEY_BYTES
    assert (order_key(None, {"key": long}) or "").startswith("sha256:")
    assert order_key(None, {"key": long}) != order_key(None, {"key": f"{long}ü"})


# --- side by side ----------------------------------------------------------------------------------------------------


def test_a_message_that_is_received_after_the_letter_s_commit_is_held_whatever_the_parker_does_next(
    leveled: Engine, business: Business
) -> None:
    """Worker A is held between its commit and its ack; the group comes to worker B, its visibility being over."""
    parked, go_on = threading.Event(), threading.Event()
    first = ordered(leveled, failing("m1"))
    park = first._processor._parker._letters.park

    def held(*args: Any, **options: Any) -> int | None:
        number = park(*args, **options)
        parked.set()
        assert go_on.wait(20)
        return number

    first._processor._parker._letters.park = held
    with ThreadPoolExecutor(1) as pool:
        parking = pool.submit(outcomes, first, in_group("m1"), in_group("m2"))
        assert parked.wait(20)
        second = ordered(leveled, max_attempts=10)
        assert outcomes(second, in_group("m1"), in_group("m2"), in_group("m3")) == dict.fromkeys(
            ("m1", "m2", "m3"), Outcome.DEAD
        )
        go_on.set()
        assert parking.result(20) == {"m1": Outcome.DEAD, "m2": Outcome.DEAD}
    assert waiting(leveled) == {"m1": "failed", "m2": "behind", "m3": "behind"}
    assert business.order() == []


@pytest.mark.parametrize("commits", [True, False])
def test_a_batch_that_meets_the_parking_of_its_first_message_waits_for_its_end(
    leveled: Engine, business: Business, commits: bool
) -> None:
    """The parker is held between its marks and its commit, or dies there."""
    marked, go_on = threading.Event(), threading.Event()
    first = ordered(leveled, failing("m1"))
    letters = first._processor._parker._letters
    forget = letters._forget_failures

    def held(connection: Connection, letter: DeadLetter) -> None:
        marked.set()
        assert go_on.wait(20)
        forget(connection, letter)
        if not commits:
            raise KeyError("the parker dies")

    letters._forget_failures = held
    with ThreadPoolExecutor(2) as pool:
        parking = pool.submit(outcomes, first, in_group("m1"))
        assert marked.wait(20)
        second = ordered(leveled, max_attempts=10, inbox=Inbox("billing", wait_seconds=20))
        processing = pool.submit(outcomes, second, in_group("m1"), in_group("m2"))
        business.wait_for_waiter()
        go_on.set()
        assert (parking.exception(20) is None) is commits
        outcome = Outcome.DEAD if commits else Outcome.PROCESSED
        assert processing.result(20) == {"m1": outcome, "m2": outcome}
    assert business.order() == ([] if commits else ["m1", "m2"])
