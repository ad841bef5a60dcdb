"""Effects in SQL that publish: the rows of the last statement go into the outbox, in the transaction of the effect."""

import pickle
from typing import Any

import pytest
from sqlalchemy import Connection, Engine

from support.postgres.statements import run
from support.txbox.outbox import OWN
from support.workers.business import Business, once
from support.workers.memory_worker import at_work, make, process, work_off
from support.workers.paid import ADD_UP, FIELDS, RETURNING, SENT, delivered, paid, published, publishing
from txbox import EffectFailed, InvalidConfiguration, Outbox, Outcome, SqlEffect
from txbox.outbox import Subscriptions
from txbox_workers.memory_source import MemorySource


def fail(engine: Engine, effect: SqlEffect) -> BaseException | None:
    """Have one message processed, which is to fail, and return the error."""
    ((settlement,),) = make(MemorySource(), engine, effect=effect)._processor.process([delivered(paid("a"))])
    assert settlement.outcome is Outcome.FAILED
    return settlement.error


@pytest.mark.parametrize("transactions", ["batch", "message"])
def test_what_fails_at_the_commit_has_published_nothing(engine: Engine, business: Business, transactions: str) -> None:
    run(engine, "CREATE TABLE known (message_id text PRIMARY KEY)")
    run(engine, "INSERT INTO known VALUES ('a'), ('c')")
    run(engine, "ALTER TABLE effect ADD FOREIGN KEY (message_id) REFERENCES known DEFERRABLE INITIALLY DEFERRED")
    worker = make(MemorySource(), engine, effect=publishing(), transactions=transactions)
    outcomes = dict(process(worker, *(delivered(paid(id_)) for id_ in "abc")))
    assert outcomes == {"a-1": Outcome.PROCESSED, "b-1": Outcome.FAILED, "c-1": Outcome.PROCESSED}
    assert published(business) == ["a", "c"]
    together = "SELECT count(*) FROM effect JOIN outbox_message AS sent ON sent.xmin = effect.xmin"
    assert business.rows(together) == [2], "each in the transaction of its effect"


def test_what_cannot_be_sent_is_not_applied(engine: Engine, business: Business) -> None:
    effect = publishing("SELECT '' AS key, 'x' AS body FROM fresh_event")
    assert "takes no key that is empty" in str(fail(engine, effect))
    assert business.recorded() == set()
    assert business.rows(f"SELECT 1 FROM outbox_message WHERE {SENT}") == []


ROWS = {
    "every column": (
        (
            "'{\"a\": 1}'::json AS body, 'k' AS key, 'own:else' AS destination, '{\"h\": \"v\"}'::jsonb AS headers, "
            "'id-1' AS message_id, interval '1 day' AS delay"
        ),
        ('{"a": 1}', "k", "own:else", {"h": "v"}, "id-1", 86_400),
    ),
    "nulls": (
        (
            "'b' AS body, null::text AS key, null::text AS destination, null::jsonb AS headers, "
            "null::text AS message_id, null::interval AS delay"
        ),
        ("b", None, OWN, {}, None, None),
    ),
    "other types": (
        (
            "'\\x00ff'::bytea AS body, 17::bigint AS key, 'null'::text AS headers, 90.5 AS delay, "
            "'123e4567-e89b-12d3-a456-426614174000'::uuid AS message_id"
        ),
        (b"\x00\xff", "17", OWN, {}, "123e4567-e89b-12d3-a456-426614174000", 90),
    ),
    "no key": ("amount::text AS body FROM fresh_event UNION ALL SELECT 'é'", ("1", None, OWN, {}, None, None)),
}


@pytest.mark.parametrize(("columns", "expected"), ROWS.values(), ids=ROWS)
def test_what_columns_say(engine: Engine, business: Business, columns: str, expected: tuple[Any, ...]) -> None:
    body, key, destination, headers, message_id, delay = expected
    effect = publishing(f"SELECT {columns}{'' if 'FROM' in columns else ' FROM fresh_event'}")
    worker = make(MemorySource(), engine, effect=effect)
    assert process(worker, delivered(paid("a"))) == [("a-1", Outcome.PROCESSED)]
    with engine.connect() as connection:
        row = connection.exec_driver_sql(
            "SELECT body, key, destination, headers, message_id, round(extract(epoch FROM due_at - clock_timestamp())) "
            "FROM outbox_message ORDER BY position"
        ).first()
    assert row is not None
    assert bytes(row[0]) == (body if isinstance(body, bytes) else body.encode())
    assert tuple(row[1:4]) == (key, destination, headers)
    assert row[4] == message_id if message_id else len(row[4]) == 36
    assert row[5] is None if delay is None else delay - 5 <= row[5] <= delay


@pytest.mark.parametrize("transactions", ["batch", "message"])
def test_rows_may_go_to_a_topic(engine: Engine, business: Business, transactions: str) -> None:
    for subscriber in ("mailing", "reports"):
        Subscriptions(engine).add("paid", subscriber)
    destination = "CASE message_id WHEN 'b' THEN 'topic:nobody' ELSE 'topic:paid' END AS destination"
    effect = publishing(f"SELECT message_id AS body, {destination} FROM fresh_event")
    worker = make(MemorySource(), engine, effect=effect, transactions=transactions)
    outcomes = dict(process(worker, *(delivered(paid(id_)) for id_ in "abc")))
    assert outcomes == {"a-1": Outcome.PROCESSED, "b-1": Outcome.FAILED, "c-1": Outcome.PROCESSED}
    found = business.rows(
        f"SELECT destination || convert_from(body, 'UTF8') FROM outbox_message WHERE {SENT} ORDER BY 1"
    )
    assert found == ["inbox:mailinga", "inbox:mailingc", "inbox:reportsa", "inbox:reportsc"]


def test_without_rows_nothing_is_published(engine: Engine, business: Business) -> None:
    effect = publishing("INSERT INTO effect SELECT 1, message_id, '' FROM fresh_event; SELECT '' AS body WHERE false")
    work_off(MemorySource([paid("a")]), engine, effect=effect)
    assert business.applied() == once("a")
    assert business.rows(f"SELECT 1 FROM outbox_message WHERE {SENT}") == []


def test_without_an_outbox_what_a_script_returns_is_ignored(engine: Engine, business: Business) -> None:
    work_off(MemorySource([paid("a")]), engine, effect=SqlEffect.of(ADD_UP + RETURNING, fields=FIELDS))
    assert business.applied() == once("a")
    assert business.rows(f"SELECT 1 FROM outbox_message WHERE {SENT}") == []


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("INSERT INTO effect SELECT 1, message_id, '' FROM fresh_event", "returns no column body"),
        ("SELECT message_id AS key FROM fresh_event", "returns no column body"),
        ("SELECT message_id, 'x' AS body, amount FROM fresh_event", "an unknown column amount; those of messages are"),
        ("SELECT 'x' AS body, 'y' AS body FROM fresh_event", "returns the column body twice"),
        ("SELECT amount AS body FROM fresh_event", "a column body of type int8, which has to be one of text"),
        ("SELECT null::text AS body FROM fresh_event", "a row whose column body is null"),
        ("SELECT 'x' AS body, '[1]'::jsonb AS headers FROM fresh_event", "column headers that is not a JSON object"),
        ("SELECT 'x' AS body, '{\"a\": 1}'::jsonb AS headers FROM fresh_event", "column headers that is not a JSON"),
        ("SELECT 'x' AS body, null::text AS destination FROM fresh_event", "a row whose column destination is null"),
    ],
)
def test_rows_that_are_no_messages_fail_and_name_the_column(
    engine: Engine, business: Business, script: str, why: str
) -> None:
    destination = None if "destination" in why else OWN
    error = fail(engine, publishing(script, destination=destination))
    assert isinstance(error, EffectFailed)
    assert str(error).startswith("the statements: its last statement returns")
    assert why in str(error)
    assert business.recorded() == set()
    assert business.applied() == {}


def test_without_a_destination_rows_need_one(engine: Engine, business: Business) -> None:
    error = fail(engine, publishing(destination=None))
    assert "returns no column destination, and the effect has no destination" in str(error)
    assert business.recorded() == set()


def test_a_span_in_a_style_that_cannot_be_read_says_so(engine: Engine, business: Business) -> None:
    script = "SET LOCAL intervalstyle = iso_8601; SELECT 'x' AS body, interval '1 s' AS delay FROM fresh_event"
    error = fail(engine, publishing(script))
    assert isinstance(error, EffectFailed)
    assert "column delay that cannot be read" in str(error)


ON_TABLE = {
    "do": "DO $$ BEGIN UPDATE account SET balance = balance + (SELECT sum(amount) FROM fresh_event); END $$;",
    "a lock first": "LOCK TABLE account IN SHARE ROW EXCLUSIVE MODE; -- 100 %\n"
    "UPDATE account SET balance = balance + (SELECT sum(amount) FROM fresh_event);",
    "one statement": "/* by pg_temp. */ WITH a AS (UPDATE account SET balance = balance + (SELECT sum(amount) "
    "FROM pg_temp.fresh_event) RETURNING 1)",
}


@pytest.mark.parametrize("script", ON_TABLE.values(), ids=ON_TABLE)
@pytest.mark.parametrize("transactions", ["batch", "message"])
def test_scripts_that_need_a_table_publish_too(
    engine: Engine, business: Business, script: str, transactions: str
) -> None:
    effect = publishing(script + RETURNING)
    assert effect.creates_table
    sent = [paid(f"m{number}", number) for number in range(10)]
    work_off(MemorySource([*sent, *sent]), engine, effect=effect, transactions=transactions)
    assert sorted(published(business)) == [message.id for message in sent]
    assert business.balance() == 45
    assert business.applied() == once(published(business))


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("DO $$ BEGIN NULL; END $$;\nINSERT INTO effect\nSELECT nothing FROM fresh_event;\nSELECT 'x' AS body", 3),
        ("DO $$ BEGIN NULL; END $$;\n\nSELECT 'x' AS body,\n  nothing FROM fresh_event", 4),
        ("UPDATE effect SET body = '';\nSELECT 'x' AS body,\n  nothing FROM fresh_event", 3),
    ],
)
def test_an_error_names_the_line(engine: Engine, business: Business, script: str, line: int) -> None:
    assert str(fail(engine, publishing(script))) == f'the statements, line {line}: column "nothing" does not exist'


@pytest.mark.parametrize("ending", ["COMMIT", "ROLLBACK", "DO $$ BEGIN NULL; END $$", "CALL nothing()"])
def test_a_script_that_cannot_return_rows_is_refused(ending: str) -> None:
    with pytest.raises(InvalidConfiguration, match=rf"line 2: its last statement is {ending.split()[0]}"):
        publishing(f"SELECT 1 FROM fresh_event;\n{ending}")


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"outbox": None}, "a destination needs an outbox"),
        ({"outbox": "outbox"}, "outbox must be an Outbox, not str"),
        ({"destination": "nowhere"}, "destination: 'nowhere' is not a destination"),
        ({"destination": 7}, "destination must be text, not int"),
    ],
)
def test_an_outbox_or_a_destination_that_cannot_work_is_refused(more: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidConfiguration, match=why):
        publishing(**more)


def test_a_worker_does_not_start_without_the_tables_of_the_outbox(engine: Engine, business: Business) -> None:
    worker = make(MemorySource(), engine, effect=publishing(outbox=Outbox(prefix="other_")))
    with pytest.raises(Exception, match=r"other_outbox_message does not exist.*txbox db upgrade"):
        worker._processor.check()


def test_it_crosses_to_another_process(engine: Engine, business: Business) -> None:
    again = pickle.loads(pickle.dumps(publishing()))
    assert again.publishes
    assert repr(again) == repr(publishing())
    work_off(MemorySource([paid("a")]), engine, effect=again)
    assert published(business) == ["a"]


def test_what_it_sets_does_not_reach_the_question_for_parked_messages(engine: Engine, business: Business) -> None:
    with engine.connect() as connection:
        schema = connection.exec_driver_sql("SELECT current_schema()").scalar_one()
    script = """
    SELECT set_config('search_path', '', true) FROM fresh_event;
    SELECT jsonb_build_object('of', message_id) AS body FROM fresh_event"""
    worker = make(MemorySource(), engine, effect=publishing(script, outbox=Outbox(schema=schema)))
    process(worker, delivered(paid("a")))
    found = worker._processor._transactions.run_batch(list(map(delivered, [paid("a"), paid("b")])))  # type: ignore[attr-defined]
    assert found.first == {"b"}
    assert published(business) == ["a", "b"]


@pytest.mark.parametrize("destination", ["''", "'nowhere'"])
def test_a_destination_of_a_row_is_judged_as_any(engine: Engine, business: Business, destination: str) -> None:
    error = fail(engine, publishing(f"SELECT 'x' AS body, {destination} AS destination FROM fresh_event"))
    assert "is not a destination" in str(error)


class DeadlyOutbox(Outbox):
    """Loses its connection once, after it has published."""

    deaths = 1

    def publish_many(self, connection_or_session: Any, messages: Any) -> list[str]:
        ids = super().publish_many(connection_or_session, messages)
        if self.deaths:
            self.deaths = 0
            assert isinstance(connection_or_session, Connection)
            connection_or_session.exec_driver_sql("SELECT pg_terminate_backend(pg_backend_pid())")
        return ids


def test_a_connection_that_is_lost_after_publishing_publishes_once(engine: Engine, business: Business) -> None:
    source = MemorySource()
    with at_work(make(source, engine, effect=publishing(outbox=(outbox := DeadlyOutbox())))):
        for id_ in "abc":
            source.send(paid(id_))
        assert source.wait_until_empty(20)
    assert outbox.deaths == 0
    assert business.applied() == once("abc")
    assert sorted(published(business)) == ["a", "b", "c"]
