"""What is too old to judge: an id that was forgotten and comes again is expired, at every isolation level."""

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine, event

from support.postgres.blocking import backend_pid, wait_until_blocked
from support.postgres.roles import restricted
from support.txbox.horizon import LONG_AGO, forget, id_of, move_horizon
from support.txbox.inbox import recorded
from support.waiting import wait_until
from txbox import Expired, Inbox, InvalidConfiguration
from txbox.inbox.age_judge import OLD_AFTER


@pytest.fixture
def statements(engine: Engine) -> list[str]:
    ran: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *arguments: ran.append(arguments[2]))
    return ran


def test_an_id_that_was_forgotten_and_comes_again_is_expired(engine: Engine, leveled: Engine, inbox: Inbox) -> None:
    with leveled.begin() as connection:
        assert inbox.record(connection, "a", sent_at=LONG_AGO) is True
    forget(engine, "a")
    with (
        pytest.raises(Expired, match=r"billing cannot tell any more .* a \(sent at 20") as caught,
        leveled.begin() as connection,
    ):
        inbox.record(connection, "a", sent_at=LONG_AGO)
    assert (caught.value.message_ids, caught.value.sent_at) == (("a",), {"a": LONG_AGO})
    assert caught.value.horizon is not None
    assert abs(datetime.now(UTC) - timedelta(days=7) - caught.value.horizon) < timedelta(minutes=5)
    assert recorded(engine) == []


def test_while_a_subscriber_forgets_nothing_no_age_matters(engine: Engine, leveled: Engine, inbox: Inbox) -> None:
    move_horizon(engine, subscriber_id="invoicing")
    with leveled.begin() as connection:
        assert inbox.record(connection, "a", sent_at=LONG_AGO) is True
        assert inbox.record_many(connection, ["b", id_of(LONG_AGO)], sent_at={"b": LONG_AGO}) == {"b", id_of(LONG_AGO)}


def test_what_is_in_the_inbox_is_a_duplicate_whatever_its_age(engine: Engine, leveled: Engine, inbox: Inbox) -> None:
    with leveled.begin() as connection:
        inbox.record_many(connection, ["a", "b"])
    move_horizon(engine)
    with leveled.begin() as connection:
        assert inbox.record(connection, "a", sent_at=LONG_AGO) is False
        assert inbox.record_many(connection, ["a", "b"], sent_at={"a": LONG_AGO, "b": LONG_AGO}) == set()


def test_of_a_batch_only_what_is_too_old_is_taken_back(engine: Engine, leveled: Engine, inbox: Inbox) -> None:
    old, young = id_of(LONG_AGO), id_of(datetime.now(UTC))
    at_the_edge = datetime.now(UTC) - timedelta(days=6, hours=23)
    move_horizon(engine)
    with leveled.begin() as connection:
        sorted_out = inbox.sort_out(
            connection,
            ["a", "b", "c", old, young],
            sent_at={"a": LONG_AGO, "b": at_the_edge, old: datetime.now(UTC), "unheard-of": LONG_AGO},
        )
    assert sorted_out.first == {"b", "c", young}
    assert sorted_out.expired == {"a", old}
    assert sorted_out.error is not None
    assert sorted_out.error.message_ids == tuple(sorted(("a", old)))
    assert {message_id for _, message_id in recorded(engine)} == {"b", "c", young}
    with leveled.connect() as connection, pytest.raises(Expired):
        inbox.record_many(connection, ["d", old])


def test_who_goes_on_after_an_expired_message_has_not_recorded_it(engine: Engine, inbox: Inbox) -> None:
    move_horizon(engine)
    with engine.begin() as connection:
        with connection.begin_nested(), pytest.raises(Expired):
            inbox.record(connection, "a", sent_at=LONG_AGO)
        with connection.begin_nested():
            assert inbox.sort_out(connection, ["b"], sent_at={"b": LONG_AGO}).expired == {"b"}
        inbox.record(connection, "c")
    assert recorded(engine) == [("billing", "c")]


def test_a_young_message_and_one_of_unknown_age_cost_no_statement(
    engine: Engine, inbox: Inbox, statements: list[str]
) -> None:
    move_horizon(engine)
    statements.clear()
    with engine.begin() as connection:
        inbox.record(connection, "a", sent_at=datetime.now(UTC) - OLD_AFTER + timedelta(minutes=5))
        inbox.record(connection, "b")
        inbox.record_many(connection, ["c", id_of(datetime.now(UTC))], sent_at={"c": datetime.now(UTC)})
    assert len(statements) == 3
    with engine.begin() as connection:
        inbox.record(connection, "d", sent_at=datetime.now(UTC) - OLD_AFTER - timedelta(minutes=5))
    assert len(statements) == 5, "an old one is judged by a second statement"


def test_unknown_age_is_run_unless_it_is_to_be_parked(engine: Engine, inbox: Inbox) -> None:
    strict = Inbox("billing", unknown_age="park")
    tomorrow = datetime.now(UTC) + timedelta(days=2)
    with engine.begin() as connection:
        assert strict.record(connection, "before there is a horizon") is True
    move_horizon(engine)
    with engine.begin() as connection:
        assert inbox.record(connection, "a") is True
        assert strict.record(connection, "b", sent_at=datetime.now(UTC)) is True
        assert strict.sort_out(connection, ["c"]).expired == {"c"}
        assert strict.sort_out(connection, ["d"], sent_at={"d": tomorrow}).expired == {"d"}, "a clock that is wrong"
    with engine.begin() as connection, pytest.raises(Expired, match="age unknown"):
        strict.record(connection, "e")
    with pytest.raises(InvalidConfiguration, match=r"^Inbox\.unknown_age must be"):
        Inbox("billing", unknown_age="refuse")  # type: ignore[arg-type]


def test_one_that_waits_for_the_deletion_of_its_row_is_expired(
    engine: Engine, leveled: Engine, inbox: Inbox, pool: ThreadPoolExecutor
) -> None:
    """The recording has begun before its row is gone: it waits for the maintainer's transaction, and is judged then."""

    def record() -> str:
        with leveled.connect() as connection, connection.begin():
            pids.append(backend_pid(connection))
            try:
                return str(inbox.record(connection, "a", sent_at=LONG_AGO))
            except Expired:
                return "expired"

    pids: list[int] = []
    with engine.begin() as connection:
        inbox.record(connection, "a")
    move_horizon(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM processed_message")
        found = pool.submit(record)
        wait_until(lambda: pids, "its transaction has begun")
        wait_until_blocked(engine, pids[0])
    assert found.result(20) == "expired"
    assert recorded(engine) == []


def test_one_that_had_begun_before_the_move_is_waited_for_and_finds_its_row(
    engine: Engine, leveled: Engine, inbox: Inbox
) -> None:
    """What a maintainer waits for, and what happened if it did not: the transaction does not see the horizon."""
    with engine.begin() as connection:
        inbox.record(connection, "a")
    with leveled.begin() as connection:
        connection.exec_driver_sql("SELECT FROM inbox_horizon")
        move_horizon(engine)
        with engine.connect() as maintainer:
            running = maintainer.exec_driver_sql(
                "SELECT pid FROM pg_locks WHERE locktype = 'virtualxid' AND pid <> pg_backend_pid()"
            ).scalars()
            assert backend_pid(connection) in set(running), "the maintainer has to wait for it"
        assert inbox.record(connection, "a", sent_at=LONG_AGO) is False
        assert inbox.record(connection, "b") is True


def test_without_the_right_to_delete_an_expired_message_is_not_recorded_either(engine: Engine, inbox: Inbox) -> None:
    move_horizon(engine)
    with (
        restricted(engine, "DELETE ON processed_message") as limited,
        pytest.raises(Expired),
        limited.begin() as connection,
    ):
        inbox.record(connection, "a", sent_at=LONG_AGO)
    assert recorded(engine) == []
