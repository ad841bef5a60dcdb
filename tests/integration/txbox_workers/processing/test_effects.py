"""Effects in SQL: many messages in one statement, each applied once, whatever happens to the others."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event

from support.effects import FIELDS as ALL_TYPES
from support.effects import GOOD, MALFORMED
from support.postgres.statements import run
from support.postgres.tcp_proxy import TcpProxy
from support.txbox.events import Kept
from support.workers.business import Business, apply, once
from support.workers.memory_worker import at_work, make, process, work_off
from support.workers.paid import EFFECT, FIELDS, INSERT, delivered, paid, published, publishing
from txbox import (
    DeadLetter,
    DeadLetters,
    EffectFailed,
    Inbox,
    InvalidConfiguration,
    Message,
    Outcome,
    Reason,
    SqlEffect,
)
from txbox_workers.memory_source import MemorySource

EITHER = pytest.mark.parametrize("effect", [EFFECT, publishing()], ids=["", "publishing"])
"""Of what is sent with the commit, or before it if its last statement returns what is to be published."""


def publishes_what_it_applies(effect: SqlEffect, business: Business) -> bool:
    return sorted(published(business)) == (sorted(business.order()) if effect.publishes else [])


@EITHER
@pytest.mark.parametrize("transactions", ["batch", "message"])
def test_each_message_is_applied_once_whatever_comes_twice(
    leveled: Engine, business: Business, transactions: str, effect: SqlEffect
) -> None:
    all_messages = [paid(f"m{number:03}", number, account=number % 2 + 1) for number in range(100)]
    sent = [message for message in all_messages for _ in range(1 + len(message.id) % 2)] + all_messages[::3]
    work_off(MemorySource(sent, batch_size=25), leveled, effect=effect, threads=3, transactions=transactions)
    assert business.applied() == once(message.id for message in all_messages)
    assert business.recorded() == {message.id for message in all_messages}
    assert (business.balance(1), business.balance(2)) == (sum(range(0, 100, 2)), sum(range(1, 100, 2)))
    assert publishes_what_it_applies(effect, business)
    ids = business.rows("SELECT message_id FROM outbox_message")
    assert len(set(ids)) == len(ids), "each has an id of its own"


def test_a_batch_is_two_round_trips(engine: Engine, business: Business) -> None:
    """Nothing of it goes through a cursor, and no table is created."""
    statements: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda _c, _k, statement, *_: statements.append(statement))
    worker = make(MemorySource(), engine, effect=EFFECT)
    assert dict(process(worker, *(delivered(paid(id_)) for id_ in "abc"))) == {
        f"{id_}-1": Outcome.PROCESSED for id_ in "abc"
    }
    assert statements == []
    assert business.applied() == once("abc")


@pytest.mark.parametrize("listens", [False, True], ids=["", "host-listens-to-commits"])
def test_duplicates_and_what_is_parked_take_no_more(leveled: Engine, business: Business, listens: bool) -> None:
    """Also with a listener of the host's, before which the statements go out by themselves."""
    worker = make(MemorySource(), leveled, effect=EFFECT)
    process(worker, *map(delivered, [paid("a"), paid("c")]))
    parked = paid("b")
    DeadLetters(leveled).park(DeadLetter("billing", "b", Reason.FAILED, "ValueError: no", 3, "queue", parked.body))
    statements: list[str] = []
    event.listen(leveled, "before_cursor_execute", lambda _c, _k, statement, *_: statements.append(statement))
    if listens:
        event.listen(leveled, "commit", lambda _connection: None)
    settled = dict(process(worker, *(delivered(paid(id_)) for id_ in "abcd")))
    assert settled == {
        "a-1": Outcome.DUPLICATE,
        "b-1": Outcome.DEAD,
        "c-1": Outcome.DUPLICATE,
        "d-1": Outcome.PROCESSED,
    }
    assert statements == []
    assert business.applied() == once("acd")


def test_a_failure_beside_duplicates_is_the_effects(engine: Engine, business: Business) -> None:
    run(engine, "ALTER TABLE account ADD CHECK (balance < 100)")
    worker = make(MemorySource(), engine, effect=EFFECT)
    process(worker, delivered(paid("a")))
    with pytest.raises(EffectFailed, match="the statements, line 3: new row for relation"):
        worker._processor._transactions.run_batch(list(map(delivered, [paid("a"), paid("b", 500)])))  # type: ignore[attr-defined]
    assert business.applied() == once("a")


def test_what_is_malformed_is_parked_and_the_others_are_applied_together(engine: Engine, business: Business) -> None:
    kept = Kept()
    sent = [paid("a"), paid("b", "much"), Message("c", b"{"), paid("d"), Message("e", b"[]")]
    worker = make(MemorySource(), engine, effect=EFFECT, hooks=[kept])
    assert dict(process(worker, *map(delivered, sent))) == {
        "a-1": Outcome.PROCESSED,
        "b-1": Outcome.DEAD,
        "c-1": Outcome.DEAD,
        "d-1": Outcome.PROCESSED,
        "e-1": Outcome.DEAD,
    }
    assert business.letters() == dict.fromkeys("bce", "malformed")
    assert business.applied() == once("ad")
    assert len(business.rows("SELECT DISTINCT xmin::text FROM effect")) == 1, "in one transaction"


def test_a_duplicate_that_is_malformed_and_one_that_was_processed_are_no_failures(
    engine: Engine, business: Business
) -> None:
    worker = make(MemorySource(), engine, effect=EFFECT)
    process(worker, delivered(paid("a")), delivered(paid("b")))
    again = process(worker, delivered(paid("a"), receive_count=2), delivered(paid("b")), delivered(paid("c")))
    assert sorted(again) == [
        ("a-2", Outcome.DUPLICATE),
        ("b-1", Outcome.DUPLICATE),
        ("c-1", Outcome.PROCESSED),
    ]
    assert business.applied() == once("abc")


@EITHER
def test_the_good_ones_commit_and_only_the_bad_one_fails(engine: Engine, business: Business, effect: SqlEffect) -> None:
    run(engine, "ALTER TABLE account ADD CHECK (balance < 100)")
    worker = make(MemorySource(), engine, effect=effect)
    sent = [paid("a"), paid("b", 500), paid("c", 2)]
    settled = [one for several in worker._processor.process(list(map(delivered, sent))) for one in several]
    assert [one.outcome for one in settled] == [Outcome.PROCESSED, Outcome.FAILED, Outcome.PROCESSED]
    assert str(settled[1].error).startswith("the statements, line 3: new row for relation")
    assert business.balance() == 3
    assert business.failing() == {"b": 1}
    assert publishes_what_it_applies(effect, business)


def test_an_error_names_the_file_and_the_line(engine: Engine, business: Business, tmp_path: Path) -> None:
    (file := tmp_path / "account.sql").write_text(
        "INSERT INTO effect (message_id, body)\nSELECT message_id, note\nFROM fresh_event;\n\n"
        "UPDATE account SET balance = 1 / 0\n  WHERE account_id IN (SELECT acount FROM fresh_event)"
    )
    worker = make(MemorySource(), engine, effect=SqlEffect(file, fields=FIELDS))
    ((settlement,),) = worker._processor.process([delivered(paid("a"))])
    assert str(settlement.error) == 'account.sql, line 6: column "acount" does not exist'
    assert business.applied() == {}


SCRIPTS = {
    "do": """
        INSERT INTO effect (message_id, body) SELECT message_id, note FROM fresh_event;
        DO $$ BEGIN
          UPDATE account SET balance = balance + (SELECT sum(amount) FROM fresh_event) WHERE account_id = 1;
        END $$
    """,
    "a lock first": """
        LOCK TABLE account IN SHARE ROW EXCLUSIVE MODE; -- 100 %
        INSERT INTO effect (message_id, body) SELECT message_id, note FROM fresh_event;
        UPDATE account SET balance = balance + (SELECT sum(amount) FROM fresh_event) WHERE account_id = 1
    """,
    "one statement": """
        WITH RECURSIVE applied AS (
          INSERT INTO effect (message_id, body) SELECT message_id, note FROM "fresh_event" RETURNING message_id
        )
        UPDATE account SET balance = balance + (SELECT sum(amount) FROM fresh_event) WHERE account_id = 1
    """,
    "merge": """
        INSERT INTO effect (message_id, body) SELECT message_id, note FROM fresh_event;
        MERGE INTO account USING (SELECT account, sum(amount) AS amount FROM fresh_event GROUP BY account) AS change
        ON account.account_id = change.account
        WHEN MATCHED THEN UPDATE SET balance = balance + change.amount
        WHEN NOT MATCHED THEN INSERT VALUES (change.account, change.amount)
    """,
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
@pytest.mark.parametrize("transactions", ["batch", "message"])
def test_scripts_of_every_shape(engine: Engine, business: Business, script: str, transactions: str) -> None:
    if "MERGE" in script and engine.dialect.server_version_info < (15,):  # type: ignore[operator]
        pytest.skip("PostgreSQL 14 has no MERGE")
    effect = SqlEffect.of(script, fields=FIELDS)
    sent = [paid(f"m{number}", number) for number in range(10)]
    work_off(MemorySource([*sent, *sent]), engine, effect=effect, transactions=transactions)
    assert business.applied() == once(message.id for message in sent)
    assert business.balance() == 45


@pytest.mark.parametrize("publishes", [False, True])
@pytest.mark.parametrize("ending", ["COMMIT", "/* so */ ROLLBACK", "SAVEPOINT a", "PREPARE TRANSACTION 'a'"])
def test_statements_cannot_end_the_transaction(
    engine: Engine, business: Business, ending: str, publishes: bool
) -> None:
    script = f"{INSERT}; {ending}; SELECT 'x' AS body"
    effect = publishing(script) if publishes else SqlEffect.of(script, fields=FIELDS)
    worker = make(MemorySource(), engine, effect=effect)
    ((settlement,),) = worker._processor.process([delivered(paid("a"))])
    assert settlement.outcome is Outcome.FAILED
    assert "leave BEGIN, COMMIT, ROLLBACK and SAVEPOINT out" in str(settlement.error)
    assert business.applied() == {}
    assert business.recorded() == set()


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("", "there is no statement"),
        ("-- nothing\n;", "there is no statement"),
        ("SELECT 1", "does not name fresh_event"),
        ("INSERT INTO t SELECT 'it FROM fresh_event", "line 1: ' is not closed"),
        ("INSERT INTO t SELECT $1 FROM fresh_event", "have a parameter"),
    ],
)
def test_a_script_that_cannot_work_is_refused_at_once(script: str, why: str) -> None:
    with pytest.raises(InvalidConfiguration, match=why):
        SqlEffect.of(script, fields=FIELDS)


def test_every_type_arrives_as_it_was_sent(engine: Engine, business: Business) -> None:
    """Postgres takes every value that is not malformed, and none that is."""
    run(
        engine,
        "CREATE TABLE event (message_id text, customer_id text, cents bigint, small smallint, price numeric(6,2), "
        "ratio double precision, paid boolean, day date, at timestamptz, local timestamp, ref uuid, "
        "details jsonb, currency text, free numeric)",
    )
    effect = SqlEffect.of("INSERT INTO event SELECT * FROM fresh_event", fields=ALL_TYPES)
    good = [Message(f"good {number}", body.encode()) for number, (body, _) in enumerate(GOOD)]
    bad = [Message(f"bad {number}", body.encode()) for number, body in enumerate(MALFORMED)]
    work_off(MemorySource(good + bad, batch_size=100), engine, effect=effect)
    assert business.letters() == {message.id: "malformed" for message in bad}
    assert set(business.rows("SELECT message_id FROM event")) == {message.id for message in good}
    with engine.connect() as connection:
        for number, (_, row) in enumerate(GOOD):
            for name, value in row.items():
                same = connection.exec_driver_sql(
                    f"SELECT {name} IS NOT DISTINCT FROM (%s::text)::{_type(connection, name)} FROM event "
                    "WHERE message_id = %s",
                    (value, f"good {number}"),
                ).scalar_one()
                assert same, (number, name)


def _type(connection: Any, column: str) -> str:
    return str(
        connection.exec_driver_sql(
            "SELECT format_type(atttypid, atttypmod) FROM pg_attribute WHERE attrelid = 'event'::regclass "
            "AND attname = %s",
            (column,),
        ).scalar_one()
    )


def test_what_was_prepared_and_is_discarded_is_prepared_again(engine: Engine, business: Business) -> None:
    """psycopg discards all prepared statements after a ROLLBACK, if it has some; a host may at any time."""
    worker = make(MemorySource(), engine, effect=EFFECT)
    for number in range(4):
        assert process(worker, delivered(paid(f"m{number}"))) == [(f"m{number}-1", Outcome.PROCESSED)]
        run(engine, "DEALLOCATE ALL")
    assert business.balance() == 4


@pytest.mark.parametrize("in_sql", [False, True])
def test_a_connection_in_another_encoding_keeps_every_id_and_text(
    schema_url: str, engine: Engine, business: Business, in_sql: bool
) -> None:
    latin = create_engine(schema_url, connect_args={"client_encoding": "latin1"})
    sent = Message("caf\u00e9", json.dumps({"amount": 1, "note": "\u00fcber"}, ensure_ascii=False).encode())
    how: dict[str, Any] = {"effect": EFFECT} if in_sql else {"handler": apply}
    work_off(MemorySource([sent, paid("other")]), latin, inbox=Inbox("billing", fingerprint=True), **how)
    latin.dispose()
    assert business.recorded() == {"caf\u00e9", "other"}
    assert not in_sql or business.order("body") == ["\u00fcber", "none"]
    with engine.begin() as connection:
        assert not Inbox("billing", fingerprint=True).record(connection, sent.id, sent.body)


@EITHER
def test_statements_that_are_discarded_between_record_and_effect_cost_a_run(
    engine: Engine, business: Business, monkeypatch: pytest.MonkeyPatch, effect: SqlEffect
) -> None:
    worker = make(MemorySource(), engine, effect=effect)
    process(worker, delivered(paid("before")))
    inbox = worker._processor._transactions._inbox  # type: ignore[attr-defined]
    recorded, discarded = inbox.recorded, list[str]()

    def discard(connection: Any, *arguments: Any, **options: Any) -> Any:
        result = recorded(connection, *arguments, **options)
        if not discarded:
            discarded.append("all")
            connection.exec_driver_sql("DEALLOCATE ALL")
        return result

    monkeypatch.setattr(inbox, "recorded", discard)
    assert process(worker, delivered(paid("a")), delivered(paid("b"))) == [
        ("a-1", Outcome.PROCESSED),
        ("b-1", Outcome.PROCESSED),
    ]
    assert discarded
    assert business.balance() == 3
    assert publishes_what_it_applies(effect, business)


def test_listeners_of_the_hosts_have_their_say_before_the_commit(engine: Engine, business: Business) -> None:
    seen: list[int] = []
    host = create_engine(engine.url)
    event.listen(
        host,
        "commit",
        lambda connection: seen.append(connection.exec_driver_sql("SELECT count(*) FROM effect").scalar_one()),
    )
    work_off(MemorySource([paid("a"), paid("b")]), host, effect=EFFECT)
    host.dispose()
    assert 2 in seen
    assert business.applied() == once("ab")


@EITHER
@pytest.mark.usefixtures("without_reports")
@pytest.mark.parametrize("reaches_server", [True, False])
def test_a_lost_answer_to_the_commit_of_an_effect_is_neither_yes_nor_no(
    proxy: TcpProxy, proxied: Engine, business: Business, reaches_server: bool, effect: SqlEffect
) -> None:
    kept = Kept()
    source = MemorySource()
    with at_work(make(source, proxied, effect=effect, hooks=[kept])):
        source.send(paid("before"))
        assert source.wait_until_empty(20)
        proxy.lose_next(reaches_server=reaches_server)
        for id_ in "abc":
            source.send(paid(id_))
        assert source.wait_until_empty(20)
    assert proxy.lost == 1
    assert business.applied() == once(["before", *"abc"])
    assert publishes_what_it_applies(effect, business)
    outcomes = [outcome for id_ in "abc" for outcome in kept.outcomes(id_)]
    assert Outcome.IN_FLIGHT in outcomes
    assert (Outcome.DUPLICATE in outcomes) is reaches_server


def test_two_workers_over_the_same_messages_and_rows_come_to_exact_totals(engine: Engine, business: Business) -> None:
    sent = [paid(f"m{number:03}", 1, account=number % 2 + 1) for number in range(300)]
    sources = [MemorySource(sent, batch_size=20) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda source: work_off(source, engine, effect=EFFECT, threads=2), sources))
    assert business.applied() == once(message.id for message in sent)
    assert (business.balance(1), business.balance(2)) == (150, 150)


def test_a_message_in_flight_elsewhere_is_handed_back(engine: Engine, business: Business) -> None:
    with engine.connect() as other:
        other.exec_driver_sql("INSERT INTO processed_message (subscriber_id, message_id) VALUES ('billing', 'a')")
        worker = make(MemorySource(), engine, effect=EFFECT)
        outcomes = dict(process(worker, delivered(paid("a")), delivered(paid("b"))))
        assert outcomes == {"a-1": Outcome.IN_FLIGHT, "b-1": Outcome.PROCESSED}
        other.rollback()
    assert process(worker, delivered(paid("a"), receive_count=2)) == [("a-2", Outcome.PROCESSED)]
    assert business.applied() == once("ab")


def test_one_of_handler_and_effect_is_needed(engine: Engine) -> None:
    with pytest.raises(InvalidConfiguration, match="one of handler, batch_handler and effect"):
        make(MemorySource(), engine, effect=EFFECT, batch_handler=print)
    with pytest.raises(InvalidConfiguration, match="effect must be a SqlEffect, not str"):
        make(MemorySource(), engine, effect="account.sql")


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("SELECT 1;\nINSERT INTO efect (message_id) SELECT message_id FROM fresh_event", 'line 2: relation "efect"'),
        ("INSERT INTO effect (message_id)\nSELECT amounts FROM fresh_event", 'line 2: column "amounts"'),
        ("UPDATE effect SET body = 5 % 'x' FROM fresh_event", "line 1: invalid input syntax"),
        ("SELEC 1 FROM fresh_event", 'line 1: syntax error at or near "SELEC"'),
        ("LOCK TABLE effect;\nUPDAT effect SET body = 'x' FROM fresh_event", 'line 2: syntax error at or near "UPDAT"'),
        ("SELECT 1 FROM pg_temp.fresh_event; SELECT * FRM effect", "line 1: syntax error"),
        ("BEGIN;\nSELECT 1 FROM fresh_event;\nCOMMIT", "line 1: its transaction is not its own; leave BEGIN"),
        ("SELECT 1 FROM fresh_event;\nPREPARE TRANSACTION 'x'", "line 2: its transaction is not its own"),
    ],
)
def test_statements_that_do_not_fit_the_tables_are_told_at_the_start(
    engine: Engine, business: Business, script: str, why: str
) -> None:
    source = MemorySource([paid("a")])
    worker = make(source, engine, effect=SqlEffect.of(script, fields=FIELDS))
    with pytest.raises(EffectFailed, match=why):
        worker.start()
    assert not worker.running
    assert len(source._ready) == 1, "nothing was taken"


@pytest.mark.parametrize(
    "made",
    [
        "CREATE FUNCTION pg_temp.f() RETURNS text BEGIN ATOMIC SELECT 1; SELECT CASE WHEN true THEN '' END; END",
        "CREATE RULE noted AS ON DELETE TO effect DO ALSO (SELECT 1; SELECT 2)",
    ],
)
def test_semicolons_within_a_statement_do_not_part_it(engine: Engine, business: Business, made: str) -> None:
    insert = "INSERT INTO effect (message_id, body) SELECT message_id, note FROM fresh_event"
    work_off(MemorySource([paid("a")]), engine, effect=SqlEffect.of(f"{made};\n{insert}", fields=FIELDS))
    assert business.applied() == once("a")


def test_a_script_that_makes_its_own_table_starts(engine: Engine, business: Business) -> None:
    script = "CREATE TEMPORARY TABLE mine ON COMMIT DROP AS SELECT message_id, note FROM fresh_event; {}"
    insert = "INSERT INTO effect (message_id, body) SELECT message_id, note FROM mine"
    work_off(MemorySource([paid("a")]), engine, effect=SqlEffect.of(script.format(insert), fields=FIELDS))
    assert business.applied() == once("a")
