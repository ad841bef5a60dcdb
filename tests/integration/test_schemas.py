"""The schemas that tests are given: clean, and as they were made."""

import pytest
from sqlalchemy import Engine

from support.postgres import schemas as schemas_module
from support.postgres.schemas import Schemas


@pytest.fixture
def schemas(admin_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Schemas:
    """Schemas of which the first one that is clean is handed on."""
    monkeypatch.setattr(schemas_module, "SPARE", 1)
    return Schemas(admin_engine)


def run_in(engine: Engine, name: str, statements: str) -> None:
    with engine.connect() as connection:  # one call is one transaction
        connection.exec_driver_sql(f"SET LOCAL search_path = {name}; {statements}")


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE dead_letter ADD extra text",
        "ALTER TABLE processed_message ALTER processed_at DROP DEFAULT",
        "ALTER TABLE message_failure DROP CONSTRAINT message_failure_attempts_check",
        "DROP INDEX dead_letter_parked_once",
        "DROP TABLE kept_response",
        "CREATE OR REPLACE VIEW processed_earlier AS SELECT subscriber_id, message_id FROM processed_message",
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$",
        "CREATE TRIGGER refuse BEFORE DELETE ON paused EXECUTE FUNCTION suppress_redundant_updates_trigger()",
        "GRANT SELECT ON paused TO pg_monitor",
        "CREATE TYPE mood AS ENUM ()",
        "ANALYZE processed_message",
    ],
)
def test_one_whose_structure_was_changed_is_dropped_and_not_handed_on(
    admin_engine: Engine, schemas: Schemas, change: str
) -> None:
    name = schemas.take()
    run_in(admin_engine, name, change)
    schemas.give_back(name)
    with admin_engine.connect() as connection:
        assert connection.exec_driver_sql(f"SELECT to_regnamespace('{name}')").scalar_one() is None
    other = schemas.take()
    assert other != name
    schemas.give_back(other)


def test_one_that_was_only_used_is_handed_on_without_what_was_left_in_it(
    admin_engine: Engine, schemas: Schemas
) -> None:
    name = schemas.take()
    letter = (
        "INSERT INTO dead_letter (subscriber_id, message_id, reason, error, attempts, source, body, body_hash, "
        "headers, envelope) VALUES ('a', '1', 'failed', '', 1, '', '', '', '{}', '{}')"
    )
    run_in(admin_engine, name, f"{letter}; CREATE TABLE effect (number serial)")
    schemas.give_back(name)
    assert schemas.take() == name
    with admin_engine.connect() as connection:
        assert connection.exec_driver_sql(f"SELECT to_regclass('{name}.effect')").scalar_one() is None
        number = connection.exec_driver_sql(
            letter.replace("dead_letter", f"{name}.dead_letter") + " RETURNING dead_letter_id"
        ).scalar_one()
        assert number == 1
        assert connection.exec_driver_sql(f"SELECT count(*) FROM {name}.dead_letter").scalar_one() == 1
        connection.exec_driver_sql(f"DROP SCHEMA {name} CASCADE")
