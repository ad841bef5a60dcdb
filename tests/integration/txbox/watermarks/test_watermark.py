"""Watermarks in one transaction: answers, round trips, places, errors; sets against one event at a time."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from support.postgres.statements import statements_sent
from support.postgres.tables import make_tables
from support.txbox.inbox import lock_timeout
from txbox import InvalidConfiguration, NotInTransaction, SchemaMissing
from txbox.postgres.sqlstates import sqlstate
from txbox.schema import tables
from txbox.watermarks import Advance, Watermarks
from txbox.watermarks.watermarks import HIGHEST_SEQUENCE, LOWEST_SEQUENCE

APPLIED, STALE, GAP = Advance

BILLING = Watermarks("billing")

Marks = dict[tuple[str, str], tuple[int, int | None]]


def marks(target: Engine | Connection, subscriber: str = "billing") -> Marks:
    """The watermarks, each with the one before, read without any code under test."""
    if isinstance(target, Engine):
        with target.connect() as connection:
            return marks(connection, subscriber)
    rows = target.exec_driver_sql(
        "SELECT aggregate_type, aggregate_id, sequence, sequence_before FROM aggregate_watermark "
        "WHERE subscriber_id = %s",
        (subscriber,),
    )
    return {(row[0], row[1]): (row[2], row[3]) for row in rows}


def one(target: Any, sequence: int, **options: Any) -> Advance:
    return BILLING.advance(target, "account", "ann", sequence, **options)


def test_the_watermark_of_a_gap_is_as_it_was(engine: Engine) -> None:
    with engine.begin() as connection:
        one(connection, 4)
        one(connection, 7)
    with engine.begin() as connection:
        before = connection.exec_driver_sql("SELECT * FROM aggregate_watermark").all()
        assert one(connection, 9, insist=True) is GAP
        assert BILLING.advance_many(connection, [("account", "ann", 9)], insist=True) == [GAP]
        assert connection.exec_driver_sql("SELECT * FROM aggregate_watermark").all() == before


def test_what_is_first_can_be_said(engine: Engine) -> None:
    for number, first in enumerate((0, 100, LOWEST_SEQUENCE, HIGHEST_SEQUENCE - 1)):
        with engine.begin() as connection:
            insist: dict[str, Any] = {"insist": True, "first": first}
            for call in (
                lambda sequence, number=number, insist=insist, on=connection: Watermarks("one").advance(
                    on, "account", str(number), sequence, **insist
                ),
                lambda sequence, number=number, insist=insist, on=connection: Watermarks("many").advance_many(
                    on, [("account", str(number), sequence)], **insist
                )[0],
            ):
                assert call(first + 1) is GAP
                if first > LOWEST_SEQUENCE:
                    with pytest.raises(InvalidConfiguration, match="give first="):
                        call(first - 1)
                assert call(first) is APPLIED
                assert first == LOWEST_SEQUENCE or call(first - 1) is STALE
                assert call(first) is STALE
                assert call(first + 1) is APPLIED


def test_the_ends_of_a_bigint_are_sequences(engine: Engine) -> None:
    with engine.begin() as connection:
        assert one(connection, LOWEST_SEQUENCE) is APPLIED
        assert one(connection, HIGHEST_SEQUENCE, insist=True) is GAP
        assert one(connection, HIGHEST_SEQUENCE) is APPLIED
        assert one(connection, LOWEST_SEQUENCE, insist=True) is STALE


def test_subscribers_types_and_aggregates_are_told_apart(engine: Engine) -> None:
    with engine.begin() as connection:
        for subscriber in ("billing", "shipping"):
            for kind in ("account", "order"):
                for name in ("1", "é", "É"):
                    assert Watermarks(subscriber).advance(connection, kind, name, 1) is APPLIED
                    assert Watermarks(subscriber).advance_many(connection, [(kind, name, 1)]) == [STALE]
    assert len(marks(engine)) == len(marks(engine, "shipping")) == 6


def test_a_rollback_takes_the_watermark_back(engine: Engine) -> None:
    with engine.begin() as connection:
        one(connection, 1)
    with engine.connect() as connection:
        assert one(connection, 2) is APPLIED
        savepoint = connection.begin_nested()
        assert one(connection, 3) is APPLIED
        savepoint.rollback()
        assert one(connection, 3, insist=True) is APPLIED
        connection.rollback()
    assert marks(engine) == {("account", "ann"): (1, None)}
    with engine.begin() as connection:
        assert one(connection, 2, insist=True) is APPLIED


# --- many ------------------------------------------------------------------------------------------------------------

EVENTS = st.lists(st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(["1", '"', "é,"]), st.integers(-1, 6)))


class Model:
    """What watermarks do, in a few lines of Python that know nothing of the code under test."""

    def __init__(self) -> None:
        self.marks: dict[tuple[str, str], int] = {}

    def advance(self, kind: str, name: str, sequence: int, *, insist: bool, first: int) -> Advance:
        mark = self.marks.get((kind, name))
        expected = first if mark is None else mark + 1
        if insist:
            if sequence > expected:
                return GAP
            if sequence < expected:
                return STALE
        elif mark is not None and sequence <= mark:
            return STALE
        self.marks[kind, name] = sequence
        return APPLIED


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=st.lists(st.tuples(EVENTS, st.booleans()), max_size=4), first=st.integers(0, 2))
def test_a_batch_is_answered_as_its_events_one_by_one(
    engine: Engine, batches: list[tuple[list[tuple[str, str, int]], bool]], first: int
) -> None:
    model = Model()
    with engine.connect() as connection:
        for events, insist in batches:
            options: Mapping[str, Any] = {"insist": insist, "first": first}
            # One below the first is refused where there is no watermark: that has a test of its own.
            events = [(kind, name, max(sequence, first)) for kind, name, sequence in events]
            expected = [model.advance(*event, **options) for event in events]
            assert Watermarks("many").advance_many(connection, events, **options) == expected
            assert [Watermarks("single").advance(connection, *event, **options) for event in events] == expected
        in_table = {key: found[0] for key, found in marks(connection, "many").items()}
        assert in_table == model.marks
        assert {key: found[0] for key, found in marks(connection, "single").items()} == model.marks
        connection.rollback()


@pytest.mark.parametrize("insist", [False, True], ids=["", "insist"])
def test_the_row_says_where_a_batch_has_found_the_watermark(engine: Engine, insist: bool) -> None:
    with engine.begin() as connection:
        for start in (1, 4):
            events = [("account", "ann", at) for at in range(start, start + 3)]
            assert BILLING.advance_many(connection, events, insist=insist) == [APPLIED] * 3
            assert marks(connection) == {("account", "ann"): (start + 2, None if start == 1 else 3)}


def test_ten_thousand_events_are_one_statement_and_two_for_who_insists(engine: Engine) -> None:
    events = [("account", str(number % 2_500), number // 2_500 + 1) for number in range(10_000)]
    for insist in (False, True):
        with engine.connect() as connection:
            BILLING.advance_many(connection, events[: len(events) // 2 : 2])
            with statements_sent(engine) as sent:
                answers = BILLING.advance_many(connection, events, insist=insist)
                assert len(sent) == (2 if insist else 1)
            assert answers[: len(events) // 2 : 2] == [STALE] * 2_500
            assert set(answers[len(events) // 2 :]) == {APPLIED}
            connection.rollback()


def test_no_events_are_no_statement(engine: Engine) -> None:
    with engine.begin() as connection, statements_sent(engine) as sent:
        assert BILLING.advance_many(connection, []) == []
        assert BILLING.advance_many(connection, iter(()), insist=True) == []
        assert sent == []


def test_rows_are_locked_in_the_order_of_their_bytes(engine: Engine) -> None:
    # As UTF-16 or by a language's rules, these would be sorted otherwise.
    names = ["\U0001f600", "ﬀ", "ä", "a", "B", "b", "A", "1"]
    for insist in (False, True):
        with engine.connect() as connection:
            BILLING.advance_many(connection, [("account", name, 1) for name in names], insist=insist)
            found = connection.exec_driver_sql("SELECT aggregate_id FROM aggregate_watermark ORDER BY ctid").scalars()
            assert found.all() == sorted(names, key=str.encode)
            connection.rollback()


# --- what goes to the server -----------------------------------------------------------------------------------------


def test_what_is_applied_or_stale_costs_one_statement_and_a_gap_two(engine: Engine) -> None:
    costs = []
    with engine.connect() as connection:
        for sequence, insist in [(1, False), (1, False), (2, True), (2, True), (3, False), (9, True)]:
            with statements_sent(engine) as sent:
                one(connection, sequence, insist=insist)
                costs.append(len(sent))
    assert costs == [1, 1, 1, 1, 1, 2]


CALLS: list[Callable[[Connection], object]] = [
    lambda target: one(target, 2),
    lambda target: one(target, 2, insist=True),
    lambda target: one(target, 9, insist=True),
    lambda target: BILLING.advance_many(target, [("account", "ann", 2), ("account", "eve", 7)]),
    lambda target: BILLING.advance_many(target, [("account", "ann", 2), ("account", "eve", 7)], insist=True),
    lambda target: BILLING.advance_from(
        target, aggregate_type="account", aggregate_id="a", sequence="s", wait_seconds=5
    ),
    lambda target: BILLING.advance_from(target, aggregate_type="account", aggregate_id="a", sequence="s"),
]


def test_the_callers_lock_timeout_is_as_it_was(engine: Engine) -> None:
    settings = (("", "0"), ("SET LOCAL lock_timeout = '7s'", "0"), ("SET lock_timeout = '7s'", "7s"))
    for call, (own, after) in itertools.product(CALLS, settings):
        with engine.connect() as connection:
            connection.exec_driver_sql(f"DELETE FROM aggregate_watermark; {own}")
            connection.exec_driver_sql("CREATE TEMPORARY TABLE fresh_event ON COMMIT DROP AS SELECT 'ann' AS a, 2 AS s")
            before = lock_timeout(connection)
            for _ in range(2):
                call(connection)
                assert lock_timeout(connection) == before
            connection.commit()
            assert lock_timeout(connection) == after
            connection.exec_driver_sql("RESET lock_timeout")
            connection.commit()


def test_the_watermarks_may_be_anywhere(fresh_engine: Engine) -> None:
    schema, prefix = "Odd schema-%", "Odd%_"
    make_tables(fresh_engine, schema, prefix)
    watermarks = Watermarks("s", schema=schema, prefix=prefix)
    with fresh_engine.begin() as connection:
        assert watermarks.advance(connection, "t", "%s", 1, insist=True) is APPLIED
        assert watermarks.advance(connection, "t", "%s", 3, insist=True) is GAP
        assert watermarks.advance(connection, "t", "other", 3, insist=True) is GAP
        assert watermarks.advance_many(connection, [("t", "%s", 2)]) == [APPLIED]
        assert watermarks.advance_many(connection, [("t", "%s", 3), ("t", "100%", 2)], insist=True) == [APPLIED, GAP]
        connection.exec_driver_sql("""CREATE TEMPORARY TABLE "Odd%%" AS SELECT '%%s' AS "A b", 4 AS "order" """)
        options: dict[str, Any] = {"aggregate_type": "t", "aggregate_id": "A b", "sequence": "order"}
        assert watermarks.advance_from(connection, "Odd%", **options) == 1
    with fresh_engine.connect() as connection:
        found = connection.execute(tables(schema, prefix).aggregate_watermark.select()).one()
        assert found[:5] == ("s", "t", "%s", 4, 3)


def test_a_missing_table_is_named_with_the_remedy(fresh_engine: Engine) -> None:
    for schema, name in [(None, "aggregate_watermark"), ("No such-%", '"No such-%".aggregate_watermark')]:
        watermarks = Watermarks("billing", schema=schema)
        calls: list[Callable[..., object]] = [
            lambda target, on=watermarks: on.advance(target, "account", "ann", 1),
            lambda target, on=watermarks: on.advance(target, "account", "ann", 1, insist=True),
            lambda target, on=watermarks: on.advance_many(target, [("account", "ann", 1)]),
            lambda target, on=watermarks: on.advance_many(target, [("account", "ann", 1)], insist=True),
            lambda target, on=watermarks: on.advance_from(
                target, aggregate_type="account", aggregate_id="a", sequence="s"
            ),
        ]
        for call in calls:
            with fresh_engine.connect() as connection:
                connection.exec_driver_sql("CREATE TEMPORARY TABLE fresh_event (a text, s int)")
                with pytest.raises(SchemaMissing, match="txbox db upgrade") as caught:
                    call(connection)
            assert caught.value.table == name


def test_a_connection_that_commits_every_statement_is_refused(engine: Engine) -> None:
    for call in (*CALLS, lambda target: BILLING.advance_many(target, [])):
        autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
        with autocommit.connect() as connection, pytest.raises(NotInTransaction):
            call(connection)
    assert marks(engine) == {}


def test_errors_of_the_database_pass_through(engine: Engine) -> None:
    for call in CALLS[:5]:
        with engine.connect() as connection:
            connection.exec_driver_sql("SET TRANSACTION READ ONLY")
            with pytest.raises(DBAPIError) as caught:
                call(connection)
        assert sqlstate(caught.value) == "25006"


def test_a_batch_with_a_sequence_below_the_first_is_refused_and_leaves_nothing(engine: Engine) -> None:
    events = [("account", "ann", 1), ("account", "bob", 0), ("account", "bob", 1)]
    with engine.begin() as connection:
        with pytest.raises(InvalidConfiguration, match="sequence 0 of account bob is below the first one, 1"):
            Watermarks("one").advance_many(connection, events, insist=True)
        assert marks(connection, "one") == {}
        assert Watermarks("one").advance_many(connection, events, insist=True, first=0) == [GAP, APPLIED, APPLIED]
        assert Watermarks("one").advance_many(connection, [("account", "bob", 0)], insist=True) == [STALE]
