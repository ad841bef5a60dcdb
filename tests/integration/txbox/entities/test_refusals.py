"""Updates that are neither applied nor duplicates: they are refused."""

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from support.txbox.entities import Account, add, replace, row
from txbox import EntityMissing, NotInTransaction, TxboxError
from txbox.entities import update_if_newer


def test_a_row_that_is_not_there_is_no_duplicate(engine: Engine) -> None:
    with engine.begin() as connection:
        with pytest.raises(EntityMissing) as missing:
            add(connection, "m-1", account_id="eve")
        assert (missing.value.entity, missing.value.key) == ("account", "account_id='eve'")
        with pytest.raises(EntityMissing):
            update_if_newer(connection, Account, "eve", "shop", 1, {})


def test_autocommit_is_refused(engine: Engine) -> None:
    autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
    with autocommit.connect() as connection, pytest.raises(NotInTransaction):
        add(connection, "m-1")
    with Session(autocommit) as session, pytest.raises(NotInTransaction):
        replace(session, 1, 1)
    assert row(engine).recent_message_ids == []


def test_an_update_that_a_trigger_prevents_is_neither_applied_nor_a_duplicate(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$; "
            "CREATE TRIGGER nothing BEFORE UPDATE ON account FOR EACH ROW EXECUTE FUNCTION nothing()"
        )
        with pytest.raises(TxboxError, match="a trigger or a policy"):
            add(connection, "m-1")
