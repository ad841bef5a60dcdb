"""Dead letters on a real Postgres: parked whole, once, and sent through again once."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import IntegrityError

from support.postgres.tables import make_tables
from support.txbox.leases import acquired
from support.waiting import wait_until
from txbox import DeadLetter, DeadLetters, Failures, Inbox, InvalidConfiguration, LetterNotFound, Reason
from txbox.dead_letters.failures import MAX_ERROR_CHARACTERS
from txbox.leases import PostgresLedger
from txbox.status import read_status

LETTER = DeadLetter(
    subscriber_id="billing",
    message_id="m-1",
    reason=Reason.FAILED,
    error="ValueError: no",
    attempts=5,
    source="https://sqs.eu-central-1.amazonaws.com/123456789012/purchases",
    body=b'{"Type": "Notification"}',
    headers={"tenant": "t-1"},
    envelope={"attributes": {"Tenant": {"DataType": "String", "StringValue": "t-1"}}, "system": {"SenderId": "A"}},
)


@pytest.fixture
def dead_letters(engine: Engine) -> DeadLetters:
    return DeadLetters(engine)


def like(**changes: Any) -> DeadLetter:
    return dataclasses.replace(LETTER, **changes)


def numbers(letters: list[DeadLetter]) -> list[int | None]:
    return [letter.dead_letter_id for letter in letters]


def count(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.exec_driver_sql("SELECT count(*) FROM dead_letter").scalar_one())


def locks_waited_for(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(
            connection.exec_driver_sql(
                "SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid) "
                "WHERE NOT granted AND query LIKE '%%dead_letter%%' AND pid <> pg_backend_pid()"
            ).scalar_one()
        )


# --- park ------------------------------------------------------------------------------------------------------------


def test_a_letter_comes_back_as_it_was_parked(engine: Engine, dead_letters: DeadLetters) -> None:
    number = dead_letters.park(LETTER)
    found = dead_letters.get(number)
    with engine.connect() as connection:
        now = connection.exec_driver_sql("SELECT clock_timestamp()").scalar_one()
    assert found.parked_at is not None
    assert found.parked_at < now
    assert found == like(dead_letter_id=number, parked_at=found.parked_at, redriven_at=None, body_size=len(LETTER.body))


def test_of_a_body_only_a_part_is_read_where_that_is_asked(dead_letters: DeadLetters) -> None:
    body = bytes(range(256)) * 40
    number = dead_letters.park(like(body=body)) or 0
    for body_from, body_bytes in ((0, 0), (0, 7), (7, 1000), (10_000, 1000), (len(body), 5)):
        found = dead_letters.get(number, body_from=body_from, body_bytes=body_bytes)
        assert (found.body, found.body_size) == (body[body_from:][:body_bytes], len(body))
    (listed,) = dead_letters.list(body_bytes=3)
    assert (listed.body, listed.body_size) == (body[:3], len(body))
    assert dead_letters.get(number).body == dead_letters.list()[0].body == body


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_is_allowed_by_the_table(dead_letters: DeadLetters, reason: Reason) -> None:
    assert dead_letters.get(dead_letters.park(like(reason=reason))).reason is reason


def test_parking_twice_is_parking_once(engine: Engine, dead_letters: DeadLetters) -> None:
    # The worker died between parking and ack; the redelivery ends here once more.
    number = dead_letters.park(LETTER)
    assert dead_letters.park(like(error="another error")) == number
    assert count(engine) == 1
    assert dead_letters.get(number).error == "another error"


def test_threads_that_park_the_same_letter_park_it_once(engine: Engine, dead_letters: DeadLetters) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(lambda _: dead_letters.park(LETTER), range(24)))) == 1
    assert count(engine) == 1


@pytest.mark.parametrize("change", [{"message_id": "m-2"}, {"subscriber_id": "shipping"}, {"body": b"other"}])
def test_what_differs_is_another_letter(engine: Engine, dead_letters: DeadLetters, change: dict[str, Any]) -> None:
    assert dead_letters.park(LETTER) != dead_letters.park(like(**change))
    assert count(engine) == 2


def test_a_letter_that_fails_again_after_its_redrive_is_a_new_one(dead_letters: DeadLetters) -> None:
    first = dead_letters.park(LETTER)
    dead_letters.redrive(first, lambda letter: None)
    second = dead_letters.park(LETTER)
    assert second != first
    assert numbers(dead_letters.list()) == [second]


def test_parking_forgets_the_failures_of_that_message_only(engine: Engine, dead_letters: DeadLetters) -> None:
    billing, shipping = Failures(engine, "billing"), Failures(engine, "shipping")
    for failures, message_id in [(billing, "m-1"), (billing, "m-2"), (shipping, "m-1")]:
        failures.fail(message_id, ValueError("no"))
    dead_letters.park(LETTER)
    assert (billing.attempts("m-1"), billing.attempts("m-2"), shipping.attempts("m-1")) == (0, 1, 1)


def test_failures_are_kept_if_the_letter_cannot_be_parked(engine: Engine, dead_letters: DeadLetters) -> None:
    failures = Failures(engine, "billing")
    failures.fail("m-1", ValueError("no"))
    with pytest.raises(IntegrityError):
        dead_letters.park(like(source=None))
    assert failures.attempts("m-1") == 1


def test_what_postgres_cannot_hold_does_not_keep_a_letter_from_being_parked(dead_letters: DeadLetters) -> None:
    number = dead_letters.park(
        like(
            error="NUL \0 " + "x" * 100_000,
            headers={"a\0": "b\0", "half": "\ud800"},
            envelope={"attributes": {"a": ["\0", {"b": "\udfff"}]}, "count": 7, "nothing": None},
        )
    )
    found = dead_letters.get(number)
    assert len(found.error) == MAX_ERROR_CHARACTERS
    assert found.headers == {"a\N{REPLACEMENT CHARACTER}": "b\N{REPLACEMENT CHARACTER}", "half": "?"}
    assert found.envelope == {
        "attributes": {"a": ["\N{REPLACEMENT CHARACTER}", {"b": "?"}]},
        "count": 7,
        "nothing": None,
    }


# --- list and get ----------------------------------------------------------------------------------------------------


def test_pages_are_in_the_order_of_parking_and_hold_what_was_asked_for(dead_letters: DeadLetters) -> None:
    parked = [dead_letters.park(like(message_id=f"m-{number}")) for number in range(5)]
    others = [dead_letters.park(like(subscriber_id="shipping", message_id=f"m-{number}")) for number in range(2)]
    dead_letters.redrive(parked[1], lambda letter: None)
    waiting = [parked[0], *parked[2:]]
    assert numbers(dead_letters.list()) == [*waiting, *others]
    assert numbers(dead_letters.list("billing")) == waiting
    assert numbers(dead_letters.list("billing", redriven=True)) == parked
    assert numbers(dead_letters.list("billing", limit=2)) == waiting[:2]
    assert numbers(dead_letters.list("billing", limit=2, after=waiting[1])) == waiting[2:4]
    assert dead_letters.list(after=others[-1]) == []
    assert dead_letters.list("nobody") == []


def test_a_letter_that_is_not_there_is_named(dead_letters: DeadLetters) -> None:
    calls = [dead_letters.get, lambda number: dead_letters.redrive(number, lambda letter: None)]
    for call in calls:
        with pytest.raises(LetterNotFound, match="dead letter 404 does not exist") as caught:
            call(404)
        assert caught.value.dead_letter_id == 404


# --- redrive ---------------------------------------------------------------------------------------------------------


def test_a_redrive_sends_the_letter_and_says_when(dead_letters: DeadLetters) -> None:
    number = dead_letters.park(LETTER)
    sent: list[DeadLetter] = []
    returned = dead_letters.redrive(number, sent.append)
    assert sent == [returned]
    assert returned.body == LETTER.body
    assert returned.redriven_at is None
    assert dead_letters.get(number).redriven_at is not None


def test_a_send_that_fails_leaves_the_letter_waiting(dead_letters: DeadLetters) -> None:
    number = dead_letters.park(LETTER)

    def refuse(letter: DeadLetter) -> None:
        raise ConnectionError("the broker is away")

    with pytest.raises(ConnectionError):
        dead_letters.redrive(number, refuse)
    assert numbers(dead_letters.list()) == [number]
    dead_letters.redrive(number, lambda letter: None)
    assert dead_letters.list() == []


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "SERIALIZABLE", "AUTOCOMMIT"])
def test_two_redrives_at_once_send_once_whatever_level_the_host_prefers(engine: Engine, isolation: str) -> None:
    dead_letters = DeadLetters(engine.execution_options(isolation_level=isolation))
    number = dead_letters.park(LETTER)
    sent: list[DeadLetter] = []
    may_go_on = Event()

    def slowly(letter: DeadLetter) -> None:
        sent.append(letter)
        assert may_go_on.wait(30)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(dead_letters.redrive, number, slowly)
        wait_until(lambda: sent, "the first redrive sending")
        second = pool.submit(dead_letters.redrive, number, slowly)
        wait_until(lambda: locks_waited_for(engine), "the second redrive waiting for the first")
        may_go_on.set()
        assert first.result(30).dead_letter_id == number
        with pytest.raises(LetterNotFound, match="was redriven before"):
            second.result(30)
    assert len(sent) == 1


# --- discard ---------------------------------------------------------------------------------------------------------


def test_a_discarded_letter_says_who_and_why_and_its_message_stays_refused(
    engine: Engine, dead_letters: DeadLetters
) -> None:
    number = dead_letters.park(LETTER)
    dead_letters.discard(number, note="sent by mistake", by="kim")
    found = dead_letters.get(number)
    assert (found.discarded_by, found.note, found.redriven_at) == ("kim", "sent by mistake", None)
    assert found.discarded_at is not None
    assert dead_letters.list() == []
    assert numbers(dead_letters.list(redriven=True)) == [number]
    assert dead_letters.park(LETTER) == number, "a copy that fails is the letter that was discarded"
    assert count(engine) == 1
    with engine.begin() as connection:
        inbox = Inbox("billing")
        assert inbox.record_many(connection, ["m-1"]) == set()
        assert inbox.find_parked(connection, {"m-1": LETTER.body}).same == {"m-1"}


def test_what_ended_cannot_end_in_another_way(dead_letters: DeadLetters) -> None:
    discarded, redriven = (dead_letters.park(like(message_id=id_)) for id_ in ("m-1", "m-2"))
    dead_letters.discard(discarded, note="no")
    dead_letters.redrive(redriven, lambda letter: None, by="kim")
    assert dead_letters.get(redriven).redriven_by == "kim"
    for number, what in ((discarded, "discarded"), (redriven, "redriven")):
        with pytest.raises(LetterNotFound, match=f"dead letter {number} was {what} before, at 2"):
            dead_letters.redrive(number, lambda letter: None)
        with pytest.raises(LetterNotFound, match=f"dead letter {number} was {what} before, at 2"):
            dead_letters.discard(number, note="no")


def test_a_discard_takes_a_note(dead_letters: DeadLetters) -> None:
    number = dead_letters.park(LETTER)
    with pytest.raises(InvalidConfiguration, match="a note that says why"):
        dead_letters.discard(number, note=" ")
    assert numbers(dead_letters.list()) == [number]


def test_a_discard_waits_for_a_redrive_and_finds_it_sent(engine: Engine, dead_letters: DeadLetters) -> None:
    number = dead_letters.park(LETTER)
    with ThreadPoolExecutor(1) as pool:

        def send(letter: DeadLetter) -> None:
            discards.append(pool.submit(dead_letters.discard, number, note="no"))
            wait_until(lambda: locks_waited_for(engine), "the discard waiting for the redrive")

        discards: list[Any] = []
        dead_letters.redrive(number, send)
        with pytest.raises(LetterNotFound, match="was redriven before"):
            discards[0].result(30)
    assert dead_letters.get(number).discarded_at is None


# --- processed since -------------------------------------------------------------------------------------------------


def test_a_message_that_was_processed_since_does_not_wait_and_is_not_sent(
    engine: Engine, dead_letters: DeadLetters
) -> None:
    number = dead_letters.park(LETTER)
    mismatch = dead_letters.park(like(body=b"another", reason=Reason.MISMATCH))
    with engine.begin() as connection:  # a person has deleted the row, and the producer sent the message again
        connection.exec_driver_sql("DELETE FROM processed_message")
        assert Inbox("billing").record(connection, "m-1")
    assert dead_letters.get(number).processed_since
    assert numbers(dead_letters.list()) == [mismatch], "the other body is not what was processed"
    assert numbers(dead_letters.list(redriven=True)) == [number, mismatch]
    assert read_status(engine).subscribers[0].dead_letters == {"mismatch": 1}
    sent: list[DeadLetter] = []
    with pytest.raises(LetterNotFound, match=f"dead letter {number} is not sent: its message was processed since"):
        dead_letters.redrive(number, sent.append)
    assert sent == []
    dead_letters.redrive(mismatch, sent.append)
    assert numbers(sent) == [mismatch]


def test_a_letter_of_a_ledger_whose_copy_was_completed_does_not_wait(engine: Engine, dead_letters: DeadLetters) -> None:
    ledger = PostgresLedger("billing", engine=engine)
    number, other = (dead_letters.park_leased(like(message_id=id_), 1) for id_ in ("m-1", "m-2"))

    def send_and_die(letter: DeadLetter) -> None:
        assert not dead_letters.waits("billing", "m-1", letter.body, 2), "it is being redriven"
        ledger.complete(acquired(ledger, "m-1"))  # the copy
        raise SystemExit

    with pytest.raises(SystemExit):
        dead_letters.redrive(number, send_and_die)
    assert dead_letters.get(number).redriven_at is None
    assert dead_letters.get(number).processed_since
    assert numbers(dead_letters.list()) == [other]


def test_a_lease_of_the_same_name_says_nothing_of_a_letter_of_the_inbox(
    engine: Engine, dead_letters: DeadLetters
) -> None:
    # As of an idempotent function that the handler has called: its effect is no sign that the handler was done.
    number = dead_letters.park(LETTER)
    ledger = PostgresLedger("billing", engine=engine)
    ledger.complete(acquired(ledger, "m-1"))
    assert numbers(dead_letters.list()) == [number]
    with engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM processed_message")
    assert numbers(dead_letters.list()) == [number]


def test_of_the_letters_of_a_ledger_the_last_one_decides(dead_letters: DeadLetters) -> None:
    first = dead_letters.park_leased(LETTER, 1)
    dead_letters.discard(first, note="no")
    assert dead_letters.waits("billing", "m-1", LETTER.body, 2), "a discarded message is not run"
    second = dead_letters.park_leased(LETTER, 1)
    dead_letters.redrive(second, lambda letter: None)
    assert not dead_letters.waits("billing", "m-1", LETTER.body, 2), "its copy is to be run"


def test_schema_and_prefix_are_kept_to(fresh_engine: Engine) -> None:
    place = {"schema": "Odd schema-%", "prefix": "Odd%_"}
    make_tables(fresh_engine, **place)
    dead_letters = DeadLetters(fresh_engine, **place)  # type: ignore[arg-type]
    number = dead_letters.park(like(message_id="100%s"))
    assert dead_letters.get(number).message_id == "100%s"
    assert numbers(dead_letters.list("billing")) == [number]
    dead_letters.redrive(number, lambda letter: None)
    assert dead_letters.list() == []
