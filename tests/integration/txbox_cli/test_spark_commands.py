"""What the commands around Spark find out before Spark is started, from a real database and real files."""

from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import Engine, event

import txbox_spark
from support.program import Ended
from txbox.maintenance.rotation import Generations, InboxConversion

Txbox = Callable[..., Ended]

ROLES = ("--subscriber", "billing", "--message-id", "event_id")


@pytest.fixture(autouse=True)
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here may take the time that Spark takes to start."""

    def start(*_: object, **__: object) -> None:
        pytest.fail("Spark would have been started")

    monkeypatch.setattr(txbox_spark, "spark_session", start)


@pytest.fixture(params=["bulk-load", "reconcile"])
def command(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    script = tmp_path / "apply.sql"
    script.write_text("SELECT FROM fresh_event", encoding="utf-8")
    return [request.param, *ROLES, *(("--apply", str(script)) if request.param == "bulk-load" else ())]


@pytest.fixture
def events(tmp_path: Path) -> str:
    file = tmp_path / "events.jsonl"
    file.write_text('{"event_id":"a"}\n', encoding="utf-8")
    return str(file)


def test_files_that_are_not_there(txbox: Txbox, command: list[str], events: str, tmp_path: Path) -> None:
    txbox(*command, events, f"{tmp_path}/none.csv").failed_in_one_line(1, f"there is nothing at {tmp_path}/none.csv")


def test_an_unknown_format(txbox: Txbox, command: list[str], events: str) -> None:
    txbox(*command, events, "--format", "avro").failed_in_one_line(2, "--format avro is unknown; use one of parquet")


def test_an_unknown_run(txbox: Txbox, command: list[str], events: str) -> None:
    if command[0] == "bulk-load":
        asked = txbox(*command, events, "--resume", "0123456789ab")
        asked.failed_in_one_line(2, "--resume: there is no bulk load '0123456789ab' in this database")


def test_a_database_that_does_not_answer(txbox: Txbox, command: list[str], events: str) -> None:
    away = "postgresql://u:hunter2@127.0.0.1:1/x"
    txbox(*command, events, "--url", away).failed_in_one_line(1, "start the server, or correct host and port")


def test_tables_that_are_not_there(txbox: Txbox, command: list[str], events: str, engine: Engine) -> None:
    txbox(*command, events, "--prefix", "no_").failed_in_one_line(1, "no_processed_message does not exist")
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE bulk_load")
    if command[0] == "bulk-load":
        txbox(*command, events).failed_in_one_line(1, "bulk_load does not exist")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--upsert-into", "nowhere"], "--upsert-into: there is no table nowhere"),
        (["--upsert-into", "purchase", "--key", "cents"], "no unique key on (cents)"),
        (["--upsert-into", "purchase", "--only-if", "newer:at"], "has no column at to tell what is newer"),
        (["--upsert-into", "purchase", "--fields", "order_id text, c text"], "has no column c, and the events have"),
    ],
)
def test_a_table_that_an_upsert_does_not_fit(
    txbox: Txbox, events: str, engine: Engine, options: list[str], said: str
) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE purchase (order_id text PRIMARY KEY, cents bigint)")
    txbox("bulk-load", *ROLES, events, *options).failed_in_one_line(2, said)


@pytest.mark.parametrize("fields", [[], ["--fields", "event_id text"]])
def test_statements_that_are_not_sql(txbox: Txbox, events: str, tmp_path: Path, fields: list[str]) -> None:
    script = tmp_path / "apply.sql"
    script.write_text("CREATE TEMP TABLE seen (id text);\nINSERT INTO seen SELEC event_id FROM fresh_event", "utf-8")
    loaded = txbox("bulk-load", *ROLES, events, *fields, "--apply", str(script))
    loaded.failed_in_one_line(1, 'the events cannot be applied: syntax error at or near "SELEC" (line 2 of the')


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_mistyped_subscriber_would_have_every_event_applied_again(
    txbox: Txbox, events: str, engine: Engine, tmp_path: Path, more: list[str]
) -> None:
    script = tmp_path / "apply.sql"
    script.write_text("SELECT FROM fresh_event", "utf-8")
    mistyped = ["bulk-load", *ROLES, events, *more, "--subscriber", "biling", "--apply", str(script)]
    with engine.begin() as connection:
        connection.exec_driver_sql("INSERT INTO processed_message (subscriber_id, message_id) VALUES ('billing', 'a')")
    txbox(*mistyped).failed_in_one_line(2, "--subscriber: biling has no id in the inbox")
    txbox(*mistyped).failed_in_one_line(2, "there are ids of billing; if it is new, give --new-subscriber")
    with pytest.raises(pytest.fail.Exception, match="Spark would have been started"):
        txbox(*mistyped, "--new-subscriber")


def test_a_subscriber_whose_ids_are_all_forgotten_is_known(
    txbox: Txbox, events: str, engine: Engine, tmp_path: Path
) -> None:
    script = tmp_path / "apply.sql"
    script.write_text("SELECT FROM fresh_event", "utf-8")
    with engine.begin() as connection:
        connection.exec_driver_sql("INSERT INTO processed_message (subscriber_id, message_id) VALUES ('mailing', 'a')")
        connection.exec_driver_sql("INSERT INTO inbox_horizon (subscriber_id, horizon) VALUES ('billing', now())")
    with pytest.raises(pytest.fail.Exception, match="Spark would have been started"):
        txbox("bulk-load", *ROLES, events, "--apply", str(script))


@pytest.mark.parametrize(
    "statements",
    [
        "CREATE FUNCTION pg_temp.f() RETURNS int BEGIN ATOMIC SELECT CASE WHEN true THEN 1 END; SELECT 1; END",
        "CREATE RULE r AS ON DELETE TO purchase DO ALSO (SELECT 1; SELECT 2)",
        "PREPARE p (int) AS SELECT $1",
        "ALTER TABLE purchase ADD COLUMN note text; INSERT INTO purchase VALUES (1, 'note')",
        "/* a /* nested /* comment */ */ */ SELECT 1",
        'WITH "begin" AS (SELECT 1) SELECT 1 AS "commit"',
        "DO $$ BEGIN PERFORM 1; END $$",
    ],
)
def test_statements_that_postgres_takes_are_not_refused(
    txbox: Txbox, events: str, engine: Engine, tmp_path: Path, statements: str
) -> None:
    script = tmp_path / "apply.sql"
    script.write_text(f"{statements};\nSELECT FROM fresh_event", "utf-8")
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE purchase (cents int)")
    with engine.connect() as connection:
        connection.exec_driver_sql("CREATE TEMPORARY TABLE fresh_event () ON COMMIT DROP")
        connection.exec_driver_sql(script.read_text("utf-8"))
    in_the_servers_log: list[object] = []
    note = in_the_servers_log.append
    event.listen(Engine, "handle_error", note)
    with pytest.raises(pytest.fail.Exception, match="Spark would have been started"):
        txbox("bulk-load", *ROLES, events, "--apply", str(script))
    event.remove(Engine, "handle_error", note)
    assert in_the_servers_log == []


def test_a_subscriber_whose_ids_are_all_in_an_older_generation_is_known(
    txbox: Txbox, events: str, engine: Engine, tmp_path: Path
) -> None:
    script = tmp_path / "apply.sql"
    script.write_text("SELECT FROM fresh_event", "utf-8")
    insert = "INSERT INTO processed_message (subscriber_id, message_id) VALUES ('{}', 'a')"
    with engine.begin() as connection:
        connection.exec_driver_sql(insert.format("billing"))
    assert InboxConversion(engine).forward()
    assert Generations(engine).rotate()
    with engine.begin() as connection:
        connection.exec_driver_sql(insert.format("shipping"))
    with pytest.raises(pytest.fail.Exception, match="Spark would have been started"):
        txbox("bulk-load", *ROLES, events, "--apply", str(script))
