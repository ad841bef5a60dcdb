"""What the inbox sends to the server, where to, and what it leaves alone."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Engine

from support.postgres.blocking import backend_pid, wait_until_blocked
from support.postgres.statements import statements_sent
from support.postgres.tables import make_tables
from support.txbox.inbox import lock_timeout, recorded
from txbox import Inbox, Mismatch
from txbox.schema import tables

PLACES = [(None, "txbox_"), ("billing", ""), ("Odd schema-%", "Odd%_")]


@pytest.mark.parametrize(("schema", "prefix"), PLACES)
def test_the_inbox_may_be_anywhere(fresh_engine: Engine, schema: str | None, prefix: str) -> None:
    make_tables(fresh_engine, schema, prefix)
    inbox = Inbox("billing", schema=schema, prefix=prefix, fingerprint=True)
    with fresh_engine.begin() as connection:
        inbox.check(connection)
        assert inbox.record(connection, "m-%s", b"body") is True
        assert inbox.record(connection, "m-%s", b"body") is False
        assert inbox.record_many(connection, {"m-%s": b"body", "100%": b"body"}) == {"100%"}
        with pytest.raises(Mismatch):
            inbox.record(connection, "100%", b"other")
    with fresh_engine.connect() as connection:
        table = tables(schema, prefix).processed_message
        assert sorted(connection.execute(table.select()).scalars()) == ["billing", "billing"]


@pytest.mark.parametrize("many", [False, True])
def test_a_first_record_is_one_insert_and_nothing_else(engine: Engine, inbox: Inbox, many: bool) -> None:
    with engine.connect() as connection:
        connection.begin()
        with statements_sent(engine) as sent:
            if many:
                assert len(inbox.record_many(connection, [f"m-{number}" for number in range(50)])) == 50
            else:
                assert inbox.record(connection, "m-1")
        assert len(sent) == 1
        assert sent[0].lstrip().startswith("WITH bound")
        assert sent[0].count("INSERT INTO processed_message") == 1
        assert connection.in_transaction(), "the caller's transaction goes on"
    assert recorded(engine) == [], "nobody has committed it"


def test_a_duplicate_costs_no_second_statement_unless_there_are_fingerprints_to_compare(engine: Engine) -> None:
    plain, careful = Inbox("plain"), Inbox("careful", fingerprint=True)
    with engine.begin() as connection:
        plain.record(connection, "m-1", b"body")
        careful.record(connection, "m-1", b"body")
    with engine.begin() as connection, statements_sent(engine) as sent:
        assert plain.record(connection, "m-1", b"body") is False
        assert len(sent) == 1
        assert careful.record(connection, "m-1", b"body") is False
        assert len(sent) == 3


@pytest.mark.parametrize("own", [None, "SET LOCAL lock_timeout = '7s'", "SET lock_timeout = '7s'"])
@pytest.mark.parametrize("many", [False, True])
def test_the_callers_lock_timeout_is_as_it_was(engine: Engine, inbox: Inbox, own: str | None, many: bool) -> None:
    with engine.connect() as connection:
        if own:
            connection.exec_driver_sql(own)
        before = lock_timeout(connection)
        for first in (True, False):
            answer = bool(inbox.record_many(connection, ["m-1"])) if many else inbox.record(connection, "m-1")
            assert answer is first
            assert lock_timeout(connection) == before
        connection.commit()
        assert lock_timeout(connection) == ("7s" if own and "LOCAL" not in own else "0")


def test_a_caller_who_waits_less_is_made_to_wait_longer_for_this_statement_only(
    engine: Engine, inbox: Inbox, pool: ThreadPoolExecutor
) -> None:
    with engine.connect() as first, engine.connect() as second:
        inbox.record(first, "m-1")
        second.exec_driver_sql("SET LOCAL lock_timeout = '1ms'")
        pid = backend_pid(second)
        waiting = pool.submit(inbox.record, second, "m-1")
        wait_until_blocked(engine, pid)
        first.rollback()
        assert waiting.result(30) is True
        assert lock_timeout(second) == "1ms"
