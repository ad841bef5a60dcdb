"""One chunk's transaction against live workers and against its own twin, on real connections and without Spark."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.exc import DBAPIError, OperationalError

from support.spark.bulk_loads import SUBSCRIBER, Books
from support.waiting import wait_until
from txbox import (
    EffectFailed,
    Outbox,
    SqlEffect,
    StatementLeftOpen,
    TransactionAborted,
    TransactionEnded,
)
from txbox.effects import publication
from txbox.postgres.guards.transaction_guard import guard
from txbox.postgres.sqlstates import sqlstate
from txbox.postgres.transactions import short_transaction
from txbox_spark.merging.chunk_merger import MERGE_ATTEMPTS, begin_chunk, merge_chunk
from txbox_spark.merging.effect_runner import ApplyFailed
from txbox_spark.merging.fresh_event import create_fresh
from txbox_spark.merging.merge_plan import ChunkCounts, MergePlan
from txbox_spark.options import Apply
from txbox_spark.reading.columns import EventColumn
from txbox_spark.rejects.remarks import RejectedRow, Remarks

RUN = "0123456789ab"
COLUMNS = (EventColumn("account_id", "c0", "integer"), EventColumn("amount", "c1", "bigint"))
APPLY = """
    INSERT INTO effect SELECT message_id, account_id, amount FROM fresh_event;
    UPDATE account SET balance = balance + fresh_event.amount FROM fresh_event
    WHERE account.account_id = fresh_event.account_id
"""
EVENTS = tuple((f"e{number}", number, 10 + number) for number in range(9))
WHOLE = ("", None)
BAD = Remarks.of([RejectedRow("a bad one")])


@pytest.fixture
def books(engine: Engine) -> Books:
    books = Books(engine)
    books.run(
        "INSERT INTO bulk_load (run_id, subscriber_id, source, digest, writer, chunks, bounds) "
        f"VALUES ('{RUN}', '{SUBSCRIBER}', 'a test', '', 'jdbc', 1, '[]')",
        'CREATE TABLE incoming (message_id text COLLATE "C", c0 integer, c1 bigint)',
        *(f"INSERT INTO incoming VALUES ('{one}', {account}, {amount})" for one, account, amount in EVENTS * 2),
    )
    return books


@pytest.fixture(params=["staged", "copied"])
def merge(engine: Engine, request: pytest.FixtureRequest) -> Iterator[Callable[..., "Future[int | None]"]]:
    """Merge chunk 0, staged or copied, in a thread: merge(apply) returns at once; None if the chunk was done before."""
    guarded = guard(engine)

    def run(apply: Apply, before_commit: Callable[[], object], pause: Callable[[float], object]) -> int | None:
        plan = MergePlan(run_id=RUN, subscriber_id=SUBSCRIBER, columns=COLUMNS, apply=apply)
        with short_transaction(guarded) as connection:
            if not begin_chunk(connection, plan, 0):
                return None
            counts = ChunkCounts(2 * len(EVENTS), 0, len(EVENTS), 0, BAD)
            staged = "incoming" if request.param == "staged" else None
            if staged is None:
                connection.exec_driver_sql(create_fresh(COLUMNS))
                connection.exec_driver_sql(
                    "INSERT INTO fresh_event SELECT DISTINCT * FROM incoming ORDER BY message_id"
                )
            applied = merge_chunk(connection, plan, 0, WHOLE, counts, staged=staged, pause=pause).applied
            before_commit()
            return applied

    with ThreadPoolExecutor() as pool:
        yield lambda apply=APPLY, before_commit=lambda: None, pause=lambda _: None: pool.submit(
            run, apply, before_commit, pause
        )


@contextmanager
def live(engine: Engine) -> Iterator[Connection]:
    """A live worker's transaction; it is rolled back unless it was committed."""
    with engine.connect() as connection:
        yield connection


def record(connection: Connection, message_id: str) -> None:
    connection.execute(
        text("INSERT INTO processed_message (subscriber_id, message_id) VALUES (:one, :two)"),
        {"one": SUBSCRIBER, "two": message_id},
    )


def waiting(books: Books, statement: str) -> Callable[[], bool]:
    """Whether a session of ours waits for a lock in a statement like this."""

    def look() -> bool:
        found = books.rows(
            "SELECT FROM pg_stat_activity AS session JOIN pg_locks USING (pid) WHERE NOT granted AND query LIKE %s "
            "AND EXISTS (SELECT FROM pg_locks AS held WHERE held.pid = session.pid AND relation = 'account'::regclass "
            "OR held.pid = session.pid AND relation = 'bulk_load_chunk'::regclass)",
            f"%{statement}%",
        )
        return bool(found)

    return look


def require_merged(books: Books, *, but: tuple[str, ...] = ()) -> None:
    """See that each event is applied once, but for those that somebody else has recorded."""
    mine = [one for one in EVENTS if one[0] not in but]
    assert books.effects() == Counter(mine)
    assert books.balances() == {account: amount for _, account, amount in mine}
    assert books.inbox() == [one for one, *_ in EVENTS]
    assert books.rows(
        "SELECT rows_read, rows_rejected, already_processed, applied, rejected_sample FROM bulk_load_chunk"
    ) == [(2 * len(EVENTS), 0, len(but), len(mine), json.loads(json.dumps(BAD.as_json())))]


def test_alone(books: Books, merge: Callable[..., "Future[int | None]"]) -> None:
    assert merge().result(20) == len(EVENTS)
    require_merged(books)
    assert merge().result(20) is None
    require_merged(books)


def test_a_live_worker_is_faster_with_some(
    engine: Engine, books: Books, merge: Callable[..., "Future[int | None]"]
) -> None:
    """They are not there when the chunk looks, and are there when it records; nor when it looks again."""
    books.record(["e0"])
    with live(engine) as worker, live(engine) as slower:
        record(worker, "e3")
        record(slower, "e7")
        merging = merge()
        for each in (worker, slower):
            wait_until(waiting(books, "INSERT INTO processed_message"), "the chunk waits for the worker")
            each.commit()
        assert merging.result(20) == len(EVENTS) - 3
    require_merged(books, but=("e0", "e3", "e7"))


def test_a_live_worker_is_faster_and_fails(
    engine: Engine, books: Books, merge: Callable[..., "Future[int | None]"]
) -> None:
    with live(engine) as worker:
        record(worker, "e3")
        merging = merge()
        wait_until(waiting(books, "INSERT INTO processed_message"), "the chunk waits for the worker")
        worker.rollback()
        assert merging.result(20) == len(EVENTS)
    require_merged(books)


def test_live_workers_are_faster_with_all(
    engine: Engine, books: Books, merge: Callable[..., "Future[int | None]"]
) -> None:
    """Then there is nothing to apply, and the effect is not even asked to."""
    with live(engine) as worker:
        for one, *_ in EVENTS:
            record(worker, one)
        merging = merge("SELECT 1 / 0")
        wait_until(waiting(books, "INSERT INTO processed_message"), "the chunk waits for the worker")
        worker.commit()
        assert merging.result(20) == 0
    require_merged(books, but=tuple(one for one, *_ in EVENTS))


@pytest.mark.parametrize("first_ends", ["commit", "rollback"])
def test_twins(books: Books, merge: Callable[..., "Future[int | None]"], first_ends: str) -> None:
    """The same chunk twice at once: one merges; the other waits, and then finds it done, or does it."""
    ready, go = threading.Event(), threading.Event()

    def hold() -> None:
        ready.set()
        assert go.wait(20)
        if first_ends == "rollback":
            raise RuntimeError("the first fails")

    first = merge(before_commit=hold)
    assert ready.wait(20)
    second = merge()
    wait_until(waiting(books, "INSERT INTO bulk_load_chunk"), "the twin waits")
    assert not second.done()
    go.set()
    if first_ends == "commit":
        assert (first.result(20), second.result(20)) == (len(EVENTS), None)
    else:
        with pytest.raises(RuntimeError, match="the first fails"):
            first.result(20)
        assert second.result(20) == len(EVENTS)
    require_merged(books)


CALLABLE_APPLY = tuple(one.strip() for one in APPLY.split(";"))


def by_statements(connection: Connection) -> None:
    for statement in CALLABLE_APPLY:
        connection.execute(text(statement))


def with_an_error_of_its_own(connection: Connection) -> None:
    try:
        by_statements(connection)
    except OperationalError as error:
        raise RuntimeError("it went wrong") from error


PUBLISHING = SqlEffect.of(
    f"{APPLY};\nSELECT message_id AS key, jsonb_build_object('of', message_id) AS body FROM fresh_event -- 100 %",
    fields="account_id int, amount bigint",
    outbox=Outbox(),
    destination="own:somewhere",
)


def published(books: Books) -> list[tuple[str, str]]:
    found = books.rows("SELECT key, convert_from(body, 'utf8') FROM outbox_message ORDER BY key")
    return [tuple(row) for row in found]


def test_an_effect_that_publishes_does_so_in_the_chunk_s_transaction(
    engine: Engine, books: Books, merge: Callable[..., "Future[int | None]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publication, "PUBLISHED_AT_ONCE", 4)

    def fail() -> None:
        raise RuntimeError("before the commit")

    with pytest.raises(RuntimeError, match="before the commit"):
        merge(PUBLISHING, before_commit=fail).result(20)
    assert published(books) == []
    with live(engine) as worker:
        record(worker, "e4")
        worker.commit()
    assert merge(PUBLISHING).result(20) == len(EVENTS) - 1
    assert merge(PUBLISHING).result(20) is None
    assert published(books) == [(one, json.dumps({"of": one})) for one, *_ in EVENTS if one != "e4"]


@pytest.mark.parametrize(
    ("script", "error", "why"),
    [
        ("SELECT 1 FROM fresh_event;\nSELECT 'x' AS body,\nnothing", ApplyFailed, r"\(line 3 of the statements\)"),
        ("SELECT 1 FROM fresh_event;\nSELECT nothing;\nSELECT 'x' AS body", ApplyFailed, r"\(line 2 of the"),
        ("SELECT 1 FROM fresh_event;\nCOMMIT;\nSELECT 'x' AS body", ApplyFailed, "leave BEGIN, COMMIT, ROLLBACK"),
        ("SELECT message_id FROM fresh_event", EffectFailed, "returns no column body"),
        ("DELETE FROM fresh_event", EffectFailed, "returns no column body"),
    ],
)
def test_an_effect_that_cannot_publish_applies_nothing(
    books: Books, merge: Callable[..., "Future[int | None]"], script: str, error: type[Exception], why: str
) -> None:
    effect = SqlEffect.of(script, fields="amount bigint", outbox=Outbox(), destination="own:somewhere")
    with pytest.raises(error, match=why):
        merge(effect).result(20)
    assert (books.inbox(), books.effects(), books.chunks(RUN)) == ([], {}, [])


@pytest.mark.parametrize("apply", [APPLY, PUBLISHING, by_statements, with_an_error_of_its_own])
def test_a_deadlock_with_a_live_worker(
    engine: Engine, books: Books, merge: Callable[..., "Future[int | None]"], apply: Apply
) -> None:
    """The worker changes an account and then wants the id; the chunk has the id and wants the account.

    The chunk's session looks for deadlocks first, so it is the one that Postgres ends.
    """
    paused: list[float] = []
    with live(engine) as worker:
        worker.exec_driver_sql("SET deadlock_timeout = '60s'")
        worker.exec_driver_sql("UPDATE account SET balance = balance + 1000 WHERE account_id = 5")
        merging = merge(apply, pause=paused.append)
        wait_until(waiting(books, "UPDATE account"), "the chunk waits for the account")
        record(worker, "e4")  # comes back when the chunk has gone back to its savepoint
        worker.commit()
        assert merging.result(30) == len(EVENTS) - 1
    assert paused  # once, or more often if the chunk is back at the id before the worker has woken
    books.run("UPDATE account SET balance = balance - 1000 WHERE account_id = 5")
    require_merged(books, but=("e4",))
    assert len(published(books)) == (len(EVENTS) - 1 if apply is PUBLISHING else 0)


def test_a_deadlock_each_time(books: Books, merge: Callable[..., "Future[int | None]"]) -> None:
    paused: list[float] = []
    merging = merge("DO $$ BEGIN RAISE EXCEPTION 'once more' USING ERRCODE = '40P01'; END $$", pause=paused.append)
    with pytest.raises(DBAPIError, match="once more") as raised:
        merging.result(20)
    assert sqlstate(raised.value) == "40P01"
    assert len(paused) == MERGE_ATTEMPTS - 1
    assert max(paused) <= 2.0
    assert (books.inbox(), books.effects(), books.chunks(RUN)) == ([], {}, [])


@pytest.mark.parametrize("code", ["40001", "40P01", "55P03"])
def test_what_passes_is_tried_again(books: Books, merge: Callable[..., "Future[int | None]"], code: str) -> None:
    """A sequence is not rolled back, so it knows how often the effect was tried."""
    books.run("CREATE SEQUENCE tries")
    apply = f"""
        {APPLY};
        DO $$ BEGIN
          IF nextval('tries') < 4 THEN RAISE EXCEPTION 'once more' USING ERRCODE = '{code}'; END IF;
        END $$"""
    assert merge(apply).result(20) == len(EVENTS)
    require_merged(books)
    assert books.rows("SELECT last_value FROM tries") == [(4,)]


@pytest.mark.parametrize(
    ("constraint", "said"),
    [
        ("CREATE UNIQUE INDEX taken ON effect (account_id)", 'unique constraint "taken"'),
        ("ALTER TABLE effect ADD CONSTRAINT taken UNIQUE (account_id) DEFERRABLE INITIALLY DEFERRED", "taken"),
    ],
)
def test_events_that_break_a_constraint_are_rejected(
    books: Books, merge: Callable[..., "Future[int | None]"], constraint: str, said: str
) -> None:
    """The unique key is of the caller's table: it is no race for the inbox."""
    broken = ("e3", "e7", "e8")
    taken = [account for one, account, _ in EVENTS if one in broken]
    books.run(constraint, *(f"INSERT INTO effect VALUES ('other', {account})" for account in taken))
    assert merge().result(20) == len(EVENTS) - len(broken)
    assert books.inbox() == [one for one, *_ in EVENTS if one not in broken]
    assert books.balances() == {account: amount for one, account, amount in EVENTS if one not in broken}
    ((read, rejected, processed, shown),) = books.rows(
        "SELECT rows_read, rows_rejected, already_processed, rejected_sample FROM bulk_load_chunk"
    )
    assert (read, rejected, processed) == (2 * len(EVENTS), len(broken), 0)
    (_, cause) = sorted(Remarks.from_json(shown).causes, key=lambda one: one.rows)
    assert cause.cause.startswith("refused by the effect: duplicate key value violates")
    assert said in cause.cause
    assert cause.rows == len(broken)
    assert json.loads(cause.example)["account_id"] == 3


def test_an_event_that_needs_another_one_is_not_rejected(
    books: Books, merge: Callable[..., "Future[int | None]"]
) -> None:
    """A row's foreign key is of another event's row, which comes later by its id; and one event is refused."""
    books.run(
        "CREATE TABLE node (id text PRIMARY KEY CHECK (id <> 'e4'), parent text REFERENCES node)",
    )
    # Of each pair the second is the parent: e0 of e1, e2 of e3, …; e8 is alone.
    apply = """
        INSERT INTO node SELECT message_id, CASE WHEN account_id % 2 = 0 AND account_id < 8
          THEN 'e' || account_id + 1 END FROM fresh_event"""
    assert merge(apply).result(20) == len(EVENTS) - 1
    assert books.inbox() == [one for one, *_ in EVENTS if one != "e4"]
    assert books.rows("SELECT count(*) FROM node") == [(len(EVENTS) - 1,)]


def test_an_event_that_a_worker_applies_meanwhile_is_not_rejected(
    engine: Engine, books: Books, merge: Callable[..., "Future[int | None]"]
) -> None:
    """Its row is in the way of the chunk's, whose effect fails for another event, too."""
    books.run("CREATE UNIQUE INDEX ON effect (account_id)", "INSERT INTO effect VALUES ('other', 5)")
    with live(engine) as worker:
        record(worker, "e3")
        worker.exec_driver_sql("INSERT INTO effect VALUES ('e3', 3, 13)")
        merging = merge()
        wait_until(waiting(books, "INSERT INTO processed_message"), "the chunk waits for the worker")
        worker.commit()
        assert merging.result(20) == len(EVENTS) - 2
    assert books.rows("SELECT rows_rejected, already_processed, applied FROM bulk_load_chunk") == [(1, 1, 7)]
    assert books.inbox() == [one for one, *_ in EVENTS if one != "e5"]


def test_statements_that_fail_for_every_event(
    books: Books, merge: Callable[..., "Future[int | None]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txbox_spark.merging.refused_events.ALL_REFUSED", 4)
    books.run("ALTER TABLE effect ADD COLUMN forgotten text NOT NULL")
    with pytest.raises(ApplyFailed, match="forgotten"):
        merge().result(20)
    assert (books.inbox(), books.chunks(RUN)) == ([], [])


def test_roles_time_outs_are_not_the_chunks(
    engine: Engine, books: Books, merge: Callable[..., "Future[int | None]"]
) -> None:
    """What guards an application against slow statements must not end a chunk that waits."""
    apply = """
        DO $$ BEGIN
          ASSERT current_setting('statement_timeout') = '0' AND current_setting('lock_timeout') = '2min';
          ASSERT current_setting('transaction_isolation') = 'read committed';
        END $$"""
    engine.dispose()

    def as_the_role_has_it(raw: psycopg.Connection, _: object) -> None:
        raw.execute("SET statement_timeout = '7s'")
        raw.execute("SET lock_timeout = '7s'")
        raw.execute("SET default_transaction_isolation = 'serializable'")
        raw.commit()

    event.listen(engine, "connect", as_the_role_has_it)
    assert merge(apply).result(20) == len(EVENTS)


def test_what_the_effect_sets_is_not_for_our_own_statements(
    engine: Engine, books: Books, merge: Callable[..., "Future[int | None]"]
) -> None:
    other = f"other_{id(books)}"
    books.run(f"CREATE ROLE {other}", f"GRANT {other} TO current_user", f"CREATE SCHEMA {other} AUTHORIZATION {other}")
    try:
        assert merge(f"{APPLY}; SET search_path = {other}; SET LOCAL ROLE {other}").result(20) == len(EVENTS)
        engine.dispose()  # that session has another search path now; a load resets its own
        require_merged(books)
    finally:
        books.run(f"DROP SCHEMA {other}", f"DROP ROLE {other}")


def test_an_effect_goes_back_to_its_own_savepoint(books: Books, merge: Callable[..., "Future[int | None]"]) -> None:
    def apply(connection: Connection) -> None:
        with suppress(DBAPIError), connection.begin_nested():
            connection.execute(text("INSERT INTO effect SELECT 'twice' FROM fresh_event"))
            connection.execute(text("SELECT 1 / 0"))
        by_statements(connection)

    assert merge(apply).result(20) == len(EVENTS)
    require_merged(books)


def commits(connection: Connection) -> None:
    connection.execute(text("INSERT INTO effect VALUES ('stray')"))
    connection.commit()


def commits_as_sql(connection: Connection) -> None:
    connection.execute(text("INSERT INTO effect VALUES ('stray'); COMMIT"))


def commits_within_a_text(connection: Connection) -> None:
    connection.exec_driver_sql(r"INSERT INTO effect VALUES ('stray'); SELECT E'\''; COMMIT; SELECT 'x'")


def commits_behind_sqlalchemy_and_goes_on(connection: Connection) -> None:
    with suppress(psycopg.Error):
        connection.connection.dbapi_connection.commit()
    connection.execute(text("INSERT INTO effect VALUES ('stray')"))


def rolls_back(connection: Connection) -> None:
    connection.rollback()


def rolls_back_and_goes_on(connection: Connection) -> None:
    connection.rollback()
    connection.execute(text("INSERT INTO effect VALUES ('stray')"))


def rolls_back_behind_sqlalchemy_and_goes_on(connection: Connection) -> None:
    connection.connection.dbapi_connection.rollback()
    connection.execute(text("INSERT INTO effect VALUES ('stray')"))


def swallows(connection: Connection) -> None:
    with suppress(DBAPIError):
        connection.execute(text("SELECT 1 / 0"))


def leaves_a_stream_open(connection: Connection) -> None:
    rows = connection.connection.cursor().stream("SELECT generate_series(1, 100000)")
    next(rows)
    _LEFT_OPEN.append(rows)


def leaves_a_thread_in_a_statement(connection: Connection) -> None:
    entered = threading.Event()

    def sleep() -> None:
        connection.execute(APPLY_LATE)
        entered.set()
        with suppress(DBAPIError):
            connection.exec_driver_sql("SELECT pg_sleep(60)")

    _THREADS.append(threading.Thread(target=sleep))
    _THREADS[-1].start()
    assert entered.wait(20)
    _THREADS[-1].join(0.2)  # it is given up


_LEFT_OPEN: list[Any] = []
_THREADS: list[threading.Thread] = []
APPLY_LATE = text("INSERT INTO effect VALUES ('late', 1, 1)")


@pytest.mark.parametrize(
    ("apply", "expected"),
    [
        (leaves_a_stream_open, StatementLeftOpen),
        (leaves_a_thread_in_a_statement, StatementLeftOpen),
        (commits, TransactionEnded),
        (commits_as_sql, TransactionEnded),
        (commits_within_a_text, TransactionEnded),
        (commits_behind_sqlalchemy_and_goes_on, TransactionEnded),
        (rolls_back, TransactionEnded),
        (rolls_back_and_goes_on, ApplyFailed),
        (rolls_back_behind_sqlalchemy_and_goes_on, TransactionEnded),
        (swallows, TransactionAborted),
    ],
)
def test_an_effect_that_ends_the_transaction(
    books: Books, merge: Callable[..., "Future[int | None]"], apply: Apply, expected: type[Exception]
) -> None:
    """It is refused, and rolled back at once: nobody waits for a session that was left open."""
    merging = merge(apply)
    with pytest.raises(expected) as raised:
        merging.result(20)
    assert type(raised.value) is expected
    while _LEFT_OPEN:  # the garbage collector would, in the middle of another test
        with suppress(psycopg.Error):
            _LEFT_OPEN.pop().close()
    while _THREADS:
        _THREADS[-1].join(20)
        assert not _THREADS.pop().is_alive(), "it does not wait for its statement's end"
    assert (books.inbox(), books.effects(), books.chunks(RUN)) == ([], {}, [])
    assert merge().result(20) == len(EVENTS)
    require_merged(books)


@pytest.mark.parametrize(
    ("statements", "why"),
    [
        ("/* x */ rollback", "the chunk is the transaction: leave BEGIN"),
        ("CALL commit_it()", "invalid transaction termination"),
        ("DO $x$ BEGIN COMMIT; END $x$", "invalid transaction termination"),
        ("$txbox$; COMMIT; --", "unterminated dollar-quoted string"),
        ("\nSELECT 2 FROM\n  acount;", r'relation "acount" does not exist \(line 7 of the statements\)'),
        (
            "INSERT INTO account SELECT 1, message_id FROM fresh_event",
            r"\(line 5 of the statements\); You will need to rewrite or cast the expression",
        ),
    ],
)
def test_statements_that_end_the_transaction_or_are_wrong(
    books: Books, merge: Callable[..., "Future[int | None]"], statements: str, why: str
) -> None:
    books.run("CREATE PROCEDURE commit_it() LANGUAGE plpgsql AS $$ BEGIN COMMIT; END $$")
    with pytest.raises(ApplyFailed, match=why):
        merge(f"{APPLY}; {statements}").result(20)
    assert (books.inbox(), books.effects(), books.chunks(RUN)) == ([], {}, [])
