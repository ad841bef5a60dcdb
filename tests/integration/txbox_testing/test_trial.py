"""The trial: which handlers it finds to be idempotent, where it finds that others are not, and how it says so."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, text

from support.postgres.statements import run
from support.postgres.tables import make_tables
from txbox import Inbox, InvalidConfiguration, Message, Outbox, SqlEffect
from txbox.leases import PostgresLedger
from txbox.outbox.lanes import lane_of
from txbox_testing import (
    NotIdempotent,
    TrialReport,
    crash_at,
    duplicate,
    lose_commit,
    lose_commit_answer,
    overtake,
    try_every_point,
)
from txbox_testing.stages.stage import dispose

from .conftest import ADD, BOOK, PURCHASE, apply

Rows = Callable[[str], list[object]]


def names(report: TrialReport) -> list[str]:
    return [point.name for point in report.points]


def failed(handler: Callable[..., Any], engine: Engine, **options: Any) -> tuple[list[str], str]:
    """Try a handler that is not idempotent; return at which points, and the text of the report."""
    with pytest.raises(NotIdempotent) as raised:
        try_every_point(handler, PURCHASE, engine=engine, **options)
    return [point.name for point in raised.value.report.failed], str(raised.value)


def test_messages_of_other_ids_pass_though_the_undisturbed_deliveries_published_into_the_same_lane(
    engine: Engine,
) -> None:
    same = [id_ for id_ in map(str, range(1_000)) if lane_of("own:there", None, id_) == lane_of("own:there", None, "0")]
    other = [id_ for id_ in map(str, range(1_000)) if id_ not in same]
    ids = iter([*same[:2], *other])

    def handler(session: Any, message: Message) -> None:
        apply(session, message)
        Outbox().publish(session, "own:there", b"booked", message_id=next(ids))

    report = try_every_point(handler, PURCHASE, engine=engine)
    assert {"outbox_message.lane", "outbox_message.message_id"} <= set(report.ignored)


def test_what_is_in_the_transaction_passes_at_every_point_and_leaves_the_rows_as_they_were(
    engine: Engine, rows: Rows
) -> None:
    def handler(session: Any, message: Message) -> None:
        apply(session, message)
        Outbox().publish(session, "own:there", b"booked")

    before = rows("SELECT booking::text FROM booking")
    report = try_every_point(handler, PURCHASE, engine=engine)
    assert names(report) == [
        'crash_at("received")',
        'crash_at("begun")',
        'crash_at("statement")',
        'crash_at("statement", 2)',
        'crash_at("statement", 3)',
        'crash_at("handled")',
        'crash_at("committed")',
        'crash_at("acked")',
        "lose_commit()",
        "lose_commit_answer()",
        "lose_ack()",
        "duplicate()",
        "duplicate(at_once=True)",
        "delay()",
        "overtake()",
    ]
    assert all(point.happened for point in report.points)
    assert {"booking.at", "booking.number", "outbox_message.message_id"} <= set(report.ignored)
    assert str(report).startswith("handler is idempotent: 15 points lead to the same state")
    assert rows("SELECT booking::text FROM booking") == before
    assert rows("SELECT message_id FROM processed_message") == []


def test_tables_that_inherit_rows_are_brought_back_each_by_itself(engine: Engine, rows: Rows) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE old_booking () INHERITS (booking)")
        connection.exec_driver_sql("CREATE TABLE all_booking () INHERITS (booking)")  # before and behind its parent
        connection.exec_driver_sql("INSERT INTO old_booking (number, account_id, note) VALUES (7, 'ann', 'old')")
        connection.exec_driver_sql("INSERT INTO all_booking (number, account_id, note) VALUES (8, 'ann', 'all')")
    assert try_every_point(apply, PURCHASE, engine=engine, faults=[duplicate()]).ok
    assert rows("SELECT note FROM booking ORDER BY note") == ["all", "old", "opened"]


def test_rows_written_over_a_connection_of_its_own_are_doubled(engine: Engine, own: Engine) -> None:
    def handler(session: Any, message: Message) -> None:
        session.execute(ADD)
        with own.begin() as connection:
            connection.execute(BOOK, {"note": "own"})

    where, report = failed(handler, engine)
    assert where == ['crash_at("closed")', 'crash_at("handled")', "lose_commit()"]
    assert 'booking: 1 row too many: {"account_id": "ann", "note": "own"}' in report
    assert "Write them through it" in report


def test_a_mark_that_is_committed_too_early_loses_the_work(engine: Engine, own: Engine) -> None:
    def handler(session: Any, message: Message) -> None:
        with own.begin() as connection:
            if connection.execute(text("SELECT FROM booking WHERE note = 'seen'")).first() is not None:
                return
            connection.execute(BOOK, {"note": "seen"})
        session.execute(ADD)

    loses = [crash_at("closed"), crash_at("statement", 3), crash_at("handled"), lose_commit()]
    keeps = [crash_at("statement", 2), lose_commit_answer(), duplicate()]
    where, report = failed(handler, engine, faults=[*loses, *keeps])
    assert where == [fault.name for fault in loses]
    assert '1 row missing: {"account_id": "ann", "cents": 2600}' in report


RUN_AGAIN = [crash_at("statement"), crash_at("handled"), lose_commit(), overtake()]
"""The points at which a handler of one statement runs twice, if all it knows is the inbox."""


def test_a_mail_is_sent_again(engine: Engine) -> None:
    mails: list[str] = []

    def handler(session: Any, message: Message) -> None:
        mails.append("to ann")
        session.execute(ADD)

    where, report = failed(handler, engine, effects=mails)
    assert where == [fault.name for fault in RUN_AGAIN]
    assert "effects: 1 too many: 'to ann'" in report
    assert "message.id as their idempotency key" in report


@pytest.mark.parametrize("as_function", [False, True])
def test_a_receiver_that_knows_the_id_makes_up_for_it(engine: Engine, as_function: bool) -> None:
    received: dict[str, str] = {}

    def handler(session: Any, message: Message) -> None:
        received[message.id] = "to ann"
        session.execute(ADD)

    how: dict[str, Any] = {"effects": received.items, "reset": received.clear} if as_function else {"effects": received}
    assert try_every_point(handler, PURCHASE, engine=engine, faults=RUN_AGAIN, **how).ok


def test_a_killed_handler_cleans_nothing_up(engine: Engine) -> None:
    cleaned: list[str] = []

    def handler(session: Any, message: Message) -> None:
        try:
            session.execute(ADD)
        finally:
            cleaned.append(message.id)

    assert try_every_point(handler, PURCHASE, engine=engine, effects=cleaned, faults=[crash_at("statement")]).ok


def test_under_a_lease_it_is_told_that_a_mail_may_have_been_sent(engine: Engine) -> None:
    ledger = PostgresLedger("mailing", engine=engine)
    mails: list[str] = []

    def naive(message: Message) -> None:
        mails.append("to ann")

    with pytest.raises(NotIdempotent, match=r"where lease\.unknown_attempts is not 0") as raised:
        try_every_point(naive, PURCHASE, engine=engine, inbox=None, ledger=ledger, effects=mails)
    report = raised.value.report
    assert [point.name for point in report.failed] == ['crash_at("handled")', "overtake()"]
    assert {'crash_at("leased")', 'crash_at("completed")'} <= set(names(report))
    assert not {"lose_commit()", "lose_commit_answer()"} & set(names(report))

    def careful(message: Message, lease: Any) -> None:
        if not (lease.unknown_attempts and mails) and lease.seconds_left:
            mails.append("to ann")

    faults = [crash_at("leased"), crash_at("handled"), crash_at("completed"), overtake()]
    options: dict[str, Any] = {"inbox": None, "ledger": ledger, "effects": mails}
    assert try_every_point(careful, PURCHASE, engine=engine, faults=faults, **options).ok


def test_batches_effects_and_an_inbox_of_ones_own(engine: Engine) -> None:
    def batch(session: Any, messages: Any) -> None:
        for message in messages:
            apply(session, message)

    messages = [PURCHASE, Message("p-2", b"{}")]
    assert try_every_point(batch, *messages, engine=engine, batch=True, inbox=Inbox("billing")).ok

    effect = SqlEffect.of(
        "INSERT INTO booking (account_id) SELECT account_id FROM fresh_event", fields="account_id text"
    )
    report = try_every_point(effect, PURCHASE, engine=engine, faults=[crash_at("committed"), crash_at("statement")])
    assert [point.happened for point in report.points] == [True, False], "no code of ours runs in it"
    assert 'could not happen to it: crash_at("statement")' in str(report)


def test_a_connection_that_is_in_use_as_its_pool_is_emptied_is_closed_when_it_is_given_back(engine: Engine) -> None:
    with engine.connect() as in_use:
        driver = in_use.connection.dbapi_connection
        dispose(engine)
    assert driver is not None
    assert driver.closed  # type: ignore[attr-defined]
    with engine.connect() as next_one:
        driver = next_one.connection.dbapi_connection
    assert not driver.closed  # type: ignore[union-attr]


def test_what_cannot_be_tried_is_refused(engine: Engine, own: Engine) -> None:
    def raises(session: Any, message: Message) -> None:
        raise RuntimeError("no such account")

    with pytest.raises(ValueError, match="undisturbed, p-1 is failed") as refused:
        try_every_point(raises, PURCHASE, engine=engine)
    assert isinstance(refused.value.__cause__, RuntimeError)

    def throws_a_die(session: Any, message: Message) -> None:
        for _ in range(next(numbers)):
            session.execute(BOOK, {"note": message.id})

    numbers = iter(range(1, 9))
    with pytest.raises(ValueError, match=r"two undisturbed deliveries from the same rows.*booking: 1 row too many"):
        try_every_point(throws_a_die, PURCHASE, engine=engine)

    def waits_for_itself(session: Any, message: Message) -> None:
        session.execute(ADD)
        with own.begin() as connection:
            connection.execute(ADD)

    with pytest.raises(ValueError, match=r"undisturbed, it is not settled within 0.5 s"):
        try_every_point(waits_for_itself, PURCHASE, engine=engine, timeout=0.5)

    with engine.begin() as connection:
        Inbox("test").record(connection, PURCHASE.id)
    with pytest.raises(ValueError, match="it was processed before this trial"):
        try_every_point(apply, PURCHASE, engine=engine)
    with pytest.raises(InvalidConfiguration, match="there is no message"):
        try_every_point(apply, engine=engine)
    for body in ({"account_id": "ann"}, "p-1"):
        with pytest.raises(TypeError, match=r"not a (dict|str): wrap it in Message\(id, body\)"):
            try_every_point(apply, body, engine=engine)  # type: ignore[arg-type]


def test_a_table_of_yours_may_be_called_as_one_of_txbox_in_another_schema(engine: Engine, own: Engine) -> None:
    make_tables(engine, "messaging")
    run(engine, "DROP TABLE paused; CREATE TABLE paused (reason text)")

    def handler(session: Any, message: Message) -> None:
        with own.begin() as connection:
            connection.execute(text("INSERT INTO paused VALUES ('own')"))

    _, report = failed(handler, engine, inbox=Inbox("billing", schema="messaging"), faults=[crash_at("handled")])
    assert "paused: 1 row too many" in report


def test_a_column_that_may_differ_is_named_and_the_others_are_compared(engine: Engine, own: Engine) -> None:
    def handler(session: Any, message: Message) -> None:
        session.execute(BOOK, {"note": str(random.random())})
        with own.begin() as connection:
            connection.execute(BOOK, {"note": "own"})

    with pytest.raises(ValueError, match=r'booking.note is "0\.\d+" and then "0\.\d+"'):
        try_every_point(handler, PURCHASE, engine=engine)
    with pytest.raises(InvalidConfiguration, match=r"there is no column booking\.text"):
        try_every_point(handler, PURCHASE, engine=engine, ignore=("booking.text",))
    with pytest.raises(NotIdempotent, match="booking: 1 row too many") as raised:
        try_every_point(
            handler, PURCHASE, engine=engine, faults=[duplicate(), crash_at("handled")], ignore=("booking.note",)
        )
    assert [point.name for point in raised.value.report.failed] == ['crash_at("handled")']
    assert "booking.note" in raised.value.report.ignored


@pytest.mark.parametrize("effect", ["cents = cents + 1", "seen_at = clock_timestamp()"])
def test_a_handler_that_knows_its_messages_by_memory_loses_its_effect(engine: Engine, effect: str) -> None:
    run(engine, "ALTER TABLE account ADD COLUMN seen_at timestamptz")
    seen: set[str] = set()

    def handler(session: Any, message: Message) -> None:
        if message.id not in seen:
            seen.add(message.id)
            session.execute(text(f"UPDATE account SET {effect}"))

    with pytest.raises(ValueError, match=r"account: .*0 statements run in place of 1.*reset=…") as refused:
        try_every_point(handler, PURCHASE, engine=engine)
    lost = "account: 0 rows changed in place of 1" if "seen_at" in effect else "account.cents is 101 and then 100"
    assert lost in str(refused.value)
    where, report = failed(handler, engine, reset=seen.clear, faults=[crash_at("handled"), lose_commit(), duplicate()])
    assert where == ['crash_at("handled")', "lose_commit()"]
    assert ("account: 0 rows changed in place of 1" if "seen_at" in effect else "account: 1 row missing") in report


def test_a_handler_that_changes_nothing_is_refused(engine: Engine) -> None:
    async def forgets_to_await(session: Any, message: Message) -> None:
        session.execute(ADD).close()

    with pytest.raises(ValueError, match=r"undisturbed, it changed nothing: .*is an `await` missing"):
        try_every_point(forgets_to_await, PURCHASE, engine=engine, effects=[])


def test_why_the_second_undisturbed_delivery_has_failed_is_said(engine: Engine) -> None:
    def handler(session: Any, message: Message) -> None:
        session.execute(text("CREATE TABLE once (number int)"))
        session.execute(ADD)

    with pytest.raises(ValueError, match=r'for the second time, from the same rows, p-1 is .*"once" already exists'):
        try_every_point(handler, PURCHASE, engine=engine)


def test_a_foreign_key_to_a_serial_number_may_differ_too(engine: Engine) -> None:
    run(engine, "CREATE TABLE receipt (booking bigint REFERENCES booking (number))")

    def handler(session: Any, message: Message) -> None:
        session.execute(BOOK, {"note": message.id})
        session.execute(text("INSERT INTO receipt SELECT max(number) FROM booking"))

    report = try_every_point(handler, PURCHASE, engine=engine, faults=[duplicate()])
    assert report.ignored == ("booking.at", "booking.number", "receipt.booking")
