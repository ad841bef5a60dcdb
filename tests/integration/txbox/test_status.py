"""How things stand, read from a real database."""

from dataclasses import replace

import pytest
from sqlalchemy import Engine

from support.postgres.statements import run
from support.postgres.tables import make_tables
from support.txbox.outbox import publish
from txbox import DeadLetter, DeadLetters, Failures, Inbox, Reason, SchemaMissing
from txbox.outbox import Outgoing
from txbox.outbox import status as outbox_status
from txbox.outbox.status import read_backlog
from txbox.status import InboxBacklog, Status, SubscriberStatus, read_status
from txbox.status import status as status_module


def record(engine: Engine, subscriber: str, *message_ids: str, prefix: str = "") -> None:
    with engine.begin() as connection:
        Inbox(subscriber, prefix=prefix).record_many(connection, message_ids)


def letter(subscriber: str, message_id: str, reason: Reason = Reason.FAILED) -> DeadLetter:
    return DeadLetter(subscriber, message_id, reason, "error", 1, "queue", b"{}")


def test_nothing_has_happened(engine: Engine) -> None:
    assert read_status(engine) == Status(0, True, ())


def test_each_subscriber_that_left_a_trace_has_a_line(engine: Engine) -> None:
    record(engine, "b", "1", "2")
    Failures(engine, "c").fail("1", ValueError("no"))
    DeadLetters(engine).park(letter("a", "1"))
    found = read_status(engine)
    assert (found.inbox_rows, found.exact) == (2, True), "what is parked is not processed"
    a, b, c = found.subscribers
    assert (a.subscriber_id, a.processed, a.last_processed_at, a.dead_letters) == ("a", 0, None, {"failed": 1})
    assert (b.subscriber_id, b.processed, b.retrying, b.dead_letters) == ("b", 2, 0, {})
    assert b.last_processed_at is not None
    assert (c.subscriber_id, c.processed, c.retrying) == ("c", 0, 1)


def test_dead_letters_are_counted_by_reason_and_only_while_they_wait(engine: Engine) -> None:
    letters = DeadLetters(engine)
    numbers = [letters.park(letter("a", message_id)) for message_id in "123"]
    letters.park(letter("a", "4", Reason.MISMATCH))
    letters.redrive(numbers[0], lambda _: None)
    (line,) = read_status(engine).subscribers
    assert line.dead_letters == {"failed": 2, "mismatch": 1}
    assert line.oldest_dead_letter_at == letters.get(numbers[1]).parked_at


def test_keys_are_held_until_the_message_of_their_letters_is_processed(engine: Engine) -> None:
    letters = DeadLetters(engine)
    keys = {"1": "ann", "2": "ann", "3": "bob", "4": None}
    numbers = [letters.park(replace(letter("a", id_), order_key=key)) for id_, key in keys.items()]
    (line,) = read_status(engine).subscribers
    assert (line.held_keys, line.oldest_held_at) == (2, letters.get(numbers[0]).parked_at)
    letters.redrive(numbers[2], lambda _: None)
    assert read_status(engine).subscribers[0].held_keys == 2, "it is on its way"
    record(engine, "a", "3")
    assert read_status(engine).subscribers[0].held_keys == 1
    letters.discard(numbers[0], note="no")
    letters.discard(numbers[1], note="no")
    assert (read_status(engine).subscribers[0].held_keys, read_status(engine).subscribers[0].oldest_held_at) == (
        0,
        None,
    )


def test_a_failure_that_a_resend_has_brought_home_is_not_retrying(engine: Engine) -> None:
    Failures(engine, "a").fail("1", ValueError("no"))
    record(engine, "a", "1")
    (line,) = read_status(engine).subscribers
    assert (line.processed, line.retrying) == (1, 0)


def test_a_large_inbox_is_estimated_unless_asked_otherwise(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    record(engine, "a", *map(str, range(500)))
    run(engine, "ANALYZE processed_message")
    record(engine, "a", "one more than was analyzed")
    monkeypatch.setattr(status_module, "EXACT_UP_TO_ROWS", 499)
    assert read_status(engine) == Status(500, False, ())
    DeadLetters(engine).park(letter("a", "parked"))
    estimated = read_status(engine)
    assert [line.processed for line in estimated.subscribers] == [None]
    assert [(line.processed, line.dead_letters) for line in read_status(engine, exact=True).subscribers] == [
        (501, {"failed": 1})
    ]


def test_an_inbox_that_was_never_analyzed_is_counted(engine: Engine) -> None:
    record(engine, "a", "1")
    assert read_status(engine).exact


@pytest.mark.parametrize("table", ["processed_message", "message_failure", "dead_letter"])
def test_each_table_that_is_missing_is_named(engine: Engine, table: str) -> None:
    run(engine, f"DROP TABLE {table} CASCADE")
    with pytest.raises(SchemaMissing) as raised:
        read_status(engine)
    assert raised.value.table == table


def test_schema_and_prefix_with_every_odd_character(fresh_engine: Engine) -> None:
    schema, prefix = 'Odd "schema" 100%', "Tx 5%_"
    make_tables(fresh_engine, schema, prefix)
    with fresh_engine.begin() as connection:
        Inbox("a", schema=schema, prefix=prefix).record(connection, "1")
    found = read_status(fresh_engine, schema=schema, prefix=prefix)
    assert (found.inbox_rows, found.subscribers[0].subscriber_id) == (1, "a")
    with pytest.raises(SchemaMissing) as raised:
        read_status(fresh_engine)
    assert raised.value.table == "processed_message"
    with pytest.raises(SchemaMissing, match='"Odd ""schema"" 100%"'):
        read_status(fresh_engine, schema=schema)


def test_plain_values(engine: Engine) -> None:
    DeadLetters(engine).park(letter("a", "1"))
    found = read_status(engine).as_dict()
    assert found["subscribers"][0]["dead_letters"] == {"failed": 1}
    assert set(found["subscribers"][0]) == set(SubscriberStatus.__slots__)


def report(engine: Engine, source: str, rates: str, age: str = "0 s") -> None:
    run(
        engine,
        "INSERT INTO worker_report (worker_id, subscriber_id, source, host, pid, version, state, per_second, seen_at) "
        f"VALUES (gen_random_uuid()::text, 'billing', '{source}', 'h', 1, '1', 'working', '{rates}', "
        f"now() - interval '{age}')",
    )


def test_what_waits_for_workers_is_put_in_relation_to_what_they_settle(engine: Engine) -> None:
    publish(engine, *(Outgoing("inbox:billing", "{}") for _ in range(30)), Outgoing("inbox:billing", "{}", delay=60))
    publish(engine, Outgoing("own:a", "{}"))
    [line] = read_status(engine).backlogs
    assert line == InboxBacklog("inbox:billing", "billing", 30, True, 1, 0, None, None)
    report(engine, "inbox:billing", '{"processed": 4, "duplicate": 1, "failed": 100}')
    report(engine, "inbox:billing", '{"processed": 5}')
    report(engine, "inbox:billing", '{"processed": 90}', age="1 min")
    report(engine, "queue", '{"processed": 90}')
    [line] = read_status(engine).backlogs
    assert (line.workers, line.per_second, line.drain_seconds) == (2, 10.0, 3.0)


def test_a_backlog_that_is_not_counted_is_estimated(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(engine, *(Outgoing("inbox:billing", str(number)) for number in range(500)))
    publish(engine, *(Outgoing("own:a", str(number)) for number in range(500)))
    run(engine, "ANALYZE outbox_message")
    monkeypatch.setattr(outbox_status, "COUNTED_MESSAGES", 64)
    found = read_status(engine)
    [line] = found.backlogs
    assert not line.exact
    assert 400 <= line.messages <= 600
    assert [one.estimate is None for one in found.outbox.destinations] == [False, True]
    assert 400 <= sum((read_backlog(engine, "inbox:billing") or {}).values()) <= 600
