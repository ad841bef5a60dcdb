"""Deletes in physical order: which blocks are looked at, how much one transaction does, what a cursor leaves behind."""

import time
from datetime import timedelta

import pytest
from sqlalchemy import Engine, event

from integration.txbox.maintenance.conftest import KEPT, StartMaintainer, found, left, letter, record
from support.postgres.statements import run
from txbox import DeadLetters
from txbox.maintenance import Retention, transactions
from txbox.maintenance import tasks as tasks_module
from txbox.maintenance.tasks import SweeperStatements, scan_tasks

BILLING = Retention(inbox={"billing": KEPT})
PLACES = {"first": "(100,0)", "beyond": "(116,0)", "rows": 5_000, "window": 86_400.0}
BY_SUBSCRIBER = {
    "subscriber_ids": ["billing"],
    "windows": [86_400.0],
    "settled": [2e9],
    "slack": timedelta(hours=1),
    "every": None,
}


def cursor(engine: Engine) -> dict[str, int]:
    """The cursors of the inbox: of its one window, and the second one."""
    detail = found(engine, "SELECT detail FROM maintenance WHERE task = 'inbox'")
    (head,) = detail["heads"].values()
    return {"head": head, "swept": detail["swept"]}


def stretches(engine: Engine, moment: str = "before_cursor_execute") -> list[tuple[int, int]]:
    """Will have each stretch of the inbox that is looked at from now on: its first block, and the one beyond.

    After the statements, those are missing that took too long.
    """
    seen: list[tuple[int, int]] = []

    @event.listens_for(engine, moment)
    def note(_connection: object, _cursor: object, statement: str, parameters: dict[str, str], *_: object) -> None:
        if "DELETE FROM processed_message" in statement:
            first, beyond = (int(parameters[name].strip("()").partition(",")[0]) for name in ("first", "beyond"))
            seen.append((first, beyond))

    return seen


@pytest.mark.parametrize("analyzed", [False, True])
def test_each_statement_looks_at_its_stretch_of_blocks_alone(engine: Engine, analyzed: bool) -> None:
    record(engine, "billing", "m-", 20_000, days_ago=31)
    run(
        engine,
        "INSERT INTO message_lease (subscriber_id, message_id, fence, attempts, owner, acquired_at, completed_at, "
        "result) SELECT subscriber_id, message_id, 1, 1, 'me', now(), processed_at, 'x' FROM processed_message",
    )
    run(
        engine,
        "INSERT INTO message_failure (subscriber_id, message_id, attempts, error) "
        "SELECT subscriber_id, message_id, 1, 'no' FROM processed_message",
    )
    run(
        engine,
        "INSERT INTO kept_response "
        "SELECT subscriber_id, message_id, processed_at, '', 201, '[]', '' FROM processed_message",
    )
    if analyzed:
        run(engine, "ANALYZE processed_message, message_lease, message_failure, kept_response")
    sql = SweeperStatements.load()
    of_tasks = {task.name: task.forget for task in scan_tasks(Retention(), sql)}
    for name in ("forget_ids", "count_ids", "forget_leases", "forget_results", "forget_responses", "failures"):
        statement = of_tasks.get(name) or getattr(sql, name)
        with engine.connect() as connection:
            plan = connection.exec_driver_sql(f"EXPLAIN {statement}", {**PLACES, **BY_SUBSCRIBER}).scalars().all()
        lines = "\n".join(plan)
        assert "Tid Range Scan" in lines, name
        for small in ("inbox_horizon", "archive"):
            lines = lines.replace(f"Seq Scan on {small}", "")
        assert "Seq Scan on" not in lines, lines


def test_no_transaction_removes_more_rows_than_it_may(engine: Engine, make_maintainer: StartMaintainer) -> None:
    run(engine, "CREATE TABLE removed_at_once (transaction_id bigint, removed bigint)")
    run(
        engine,
        "CREATE FUNCTION note_removed() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO removed_at_once "
        "SELECT pg_current_xact_id()::text::bigint, count(*) FROM gone; RETURN NULL; END $$",
    )
    run(
        engine,
        "CREATE TRIGGER note AFTER DELETE ON processed_message REFERENCING OLD TABLE AS gone "
        "FOR EACH STATEMENT EXECUTE FUNCTION note_removed()",
    )
    record(engine, "billing", "old-", 9_000, days_ago=31)
    make_maintainer(BILLING, rows_per_transaction=500).run_once()
    assert left(engine) == {}
    sums = "SELECT sum(removed) AS removed FROM removed_at_once GROUP BY transaction_id"
    assert found(engine, f"SELECT max(removed) FROM ({sums}) AS each") == 500


def test_statements_that_take_too_long_are_made_smaller(engine: Engine, make_maintainer: StartMaintainer) -> None:
    run(
        engine,
        "CREATE FUNCTION be_slow() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM pg_sleep(0.002); RETURN old; END $$",
    )
    run(engine, "CREATE TRIGGER slow BEFORE DELETE ON processed_message FOR EACH ROW EXECUTE FUNCTION be_slow()")
    record(engine, "billing", "old-", 1_000, days_ago=31)
    looked_at = stretches(engine)
    make_maintainer(BILLING).run_once()
    assert left(engine) == {}
    blocks = found(engine, "SELECT pg_relation_size('processed_message') / 8192")
    assert looked_at[0] == (0, blocks)
    assert {(block, block + 1) for block in range(blocks)} <= set(looked_at), "a block takes longer than 100 ms"


def test_a_budget_is_kept(engine: Engine, make_maintainer: StartMaintainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactions, "LEASE_SECONDS", 3_000)  # a third of which is the longest pause
    record(engine, "billing", "old-", 20_000, days_ago=31)
    maintainer = make_maintainer(BILLING, budget_ms_per_second=100)
    pauses: list[float] = []
    in_statements: list[float] = []
    maintainer._transactions._wait = pauses.append

    @event.listens_for(engine, "before_cursor_execute")
    def begin(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if "DELETE FROM processed_message" in statement:
            in_statements.append(-time.monotonic())

    @event.listens_for(engine, "after_cursor_execute")
    def end(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if "DELETE FROM processed_message" in statement:
            in_statements[-1] += time.monotonic()

    maintainer._transactions._saved = 0.0
    began = time.monotonic()
    assert maintainer.run_once().removed["inbox"] == 20_000
    passed = time.monotonic() - began + sum(pauses)
    assert sum(in_statements) <= passed / 10, "a tenth of all time"
    assert sum(pauses) > 0


@pytest.mark.parametrize("then_kept", [KEPT, timedelta(days=20)], ids=["the same window", "another window"])
def test_the_table_becomes_a_ring_and_the_cursor_follows_it(
    engine: Engine, make_maintainer: StartMaintainer, monkeypatch: pytest.MonkeyPatch, then_kept: timedelta
) -> None:
    for name, days_ago in (("oldest-", 50), ("old-", 40), ("young-", 1)):
        record(engine, "billing", name, 30_000, days_ago=days_ago)
    monkeypatch.setattr(tasks_module, "SLACK", timedelta(days=15))  # as if it were that long ago
    make_maintainer(BILLING).run_once()
    assert left(engine) == {"old-": 30_000, "young-": 30_000}
    stayed_at = cursor(engine)["head"]
    assert stayed_at > 100
    with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        connection.exec_driver_sql("VACUUM processed_message")
    record(engine, "billing", "new-", 20_000, days_ago=0)
    assert found(engine, "SELECT (min(ctid)::text::point)[0] FROM processed_message WHERE message_id = 'new-1'") < 50
    monkeypatch.undo()
    looked_at = stretches(engine)
    make_maintainer(Retention(inbox={"billing": then_kept})).run_once()
    assert left(engine) == {"young-": 30_000, "new-": 20_000}
    assert looked_at[0][0] == stayed_at, "it does not begin at the table's first block, which has new rows"


def test_a_few_old_rows_behind_young_ones_do_not_take_the_cursor_past_them(
    engine: Engine, make_maintainer: StartMaintainer
) -> None:
    for name, days_ago, count in (("old-", 40, 20_000), ("next-", 29, 1_000), ("odd-", 40, 20), ("young-", 1, 30_000)):
        record(engine, "billing", name, count, days_ago=days_ago)
    next_ones = found(engine, "SELECT (min(ctid)::text::point)[0] FROM processed_message WHERE message_id ~ '^next-'")
    make_maintainer(BILLING).run_once()
    assert left(engine) == {"next-": 1_000, "young-": 30_000}
    assert cursor(engine)["head"] == next_ones


def test_a_cursor_that_waits_at_a_young_end_keeps_no_old_begin(
    engine: Engine, make_maintainer: StartMaintainer
) -> None:
    record(engine, "billing", "old-", 20_000, days_ago=40)
    record(engine, "billing", "young-", 30_000, days_ago=1)
    end = found(engine, "SELECT (min(ctid)::text::point)[0]::int FROM processed_message WHERE message_id ~ '^young-'")
    run(
        engine,
        "INSERT INTO maintenance (task, finished_at, detail) VALUES ('inbox', now(), "
        "jsonb_build_object('heads', jsonb_build_object('2.592e+06', %s), 'swept', %s))",
        (end + 1, end + 1),
    )
    make_maintainer(BILLING).run_once()
    assert left(engine) == {"young-": 30_000}


def test_rows_that_cannot_be_cleaned_up_are_not_looked_at_again(
    engine: Engine,
    make_maintainer: StartMaintainer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HELD_SECONDS", "HELD_TRANSACTIONS"):
        monkeypatch.setattr(f"txbox.outbox.snapshot_holders.{name}", 0)
    record(engine, "billing", "old-", 40_000, days_ago=30)  # an hour behind the horizon is not long enough
    record(engine, "billing", "young-", 20_000, days_ago=1)
    make_maintainer(BILLING).run_once()
    assert sum(left(engine).values()) == 60_000
    monkeypatch.setattr(tasks_module, "SLACK", timedelta(0))
    blocks = found(engine, "SELECT pg_relation_size('processed_message') / 8192")
    with engine.execution_options(isolation_level="REPEATABLE READ").connect() as holder:
        holder.exec_driver_sql("SELECT count(*) FROM processed_message")
        make_maintainer(BILLING).run_once()
        assert left(engine) == {"young-": 20_000}
        assert "holds a snapshot" in caplog.text
        with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
            connection.exec_driver_sql("VACUUM processed_message")
        looked_at = stretches(engine, "after_cursor_execute")
        assert make_maintainer(BILLING).run_once().removed["inbox"] == 0
        assert looked_at[0][0] > blocks / 2
        assert sum(beyond - first for first, beyond in looked_at) < blocks * 2 / 3


def test_what_a_cursor_has_left_behind_is_found_within_a_day(engine: Engine, make_maintainer: StartMaintainer) -> None:
    letters = DeadLetters(engine)
    number = letters.park(letter("parked"))
    run(engine, "UPDATE processed_message SET processed_at = now() - interval '40 days'")
    record(engine, "billing", "young-", 60_000, days_ago=1)
    make_maintainer(BILLING).run_once()
    run(engine, "UPDATE dead_letter SET discarded_at = now() - interval '40 days' WHERE dead_letter_id = %s", (number,))
    run(
        engine,
        'UPDATE maintenance SET detail = \'{"heads": {"2.592e+06": 200}, "probes": {"2.592e+06": 300}, "swept": 200}\' '
        "WHERE task = 'inbox'",
    )
    make_maintainer(BILLING).run_once()
    assert left(engine)["parked"] == 1, "not yet: the second cursor is elsewhere"
    run(engine, "UPDATE maintenance SET finished_at = now() - interval '1 day' WHERE task = 'inbox'")
    make_maintainer(BILLING).run_once()
    assert left(engine) == {"young-": 60_000}


def test_subscribers_with_other_windows_do_not_hide_each_others_old_rows(
    engine: Engine, make_maintainer: StartMaintainer
) -> None:
    for days_ago in (100, 60, 1):
        for subscriber in ("a", "b", "kept"):
            record(engine, subscriber, f"{subscriber}{days_ago}d-", 10_000, days_ago=days_ago)
    make_maintainer(Retention(inbox={"a": KEPT, "b": timedelta(days=90)})).run_once()
    assert set(left(engine)) == {"a1d-", "b1d-", "b60d-", "kept1d-", "kept60d-", "kept100d-"}


def test_a_table_that_became_smaller_is_swept_from_its_begin(engine: Engine, make_maintainer: StartMaintainer) -> None:
    record(engine, "billing", "old-", 10, days_ago=31)
    run(
        engine,
        'INSERT INTO maintenance (task, detail) VALUES (\'inbox\', \'{"heads": {"2.592e+06": 900}, "swept": 900}\')',
    )
    make_maintainer(BILLING).run_once()
    assert left(engine) == {}
