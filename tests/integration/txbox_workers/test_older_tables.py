"""Tables of an older version, as when code is deployed before its migration: each part says which one, and the cure.

There is no older version yet that these can be tried with, so what a later one may add is taken away."""

from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

from support.aws.lambda_events import Context, of
from support.txbox.events import Kept
from support.txbox.publishers import RecordingPublisher
from support.waiting import wait_until
from support.workers.business import Business
from support.workers.ledger_worker import beside
from support.workers.ledger_worker import make as make_with_ledger
from support.workers.memory_worker import at_work, delivery, make, messages, process
from txbox import Inbox, Message, Outcome, SchemaMissing, TxboxError
from txbox.instrumentation import DatabaseLost
from txbox.leases import PostgresLedger
from txbox.relay import Relay
from txbox.status import read_status
from txbox_aws.lambda_ import sqs_handler
from txbox_migrations import upgrade_database
from txbox_spark.loading.ledger import LoadLedger
from txbox_workers.memory_source import MemorySource

OLDER = """
ALTER TABLE processed_message DROP dead_letter_id;
ALTER TABLE message_lease DROP lease_seconds;
ALTER TABLE outbox_relay DROP backend_pid;
"""


@pytest.fixture
def older(fresh_database: str) -> Iterator[Engine]:
    """A database whose tables lack columns that everything needs."""
    upgrade_database(fresh_database)
    engine = create_engine(fresh_database)
    change(engine, OLDER)
    yield engine
    engine.dispose()


def change(engine: Engine, statements: str) -> None:
    with engine.begin() as connection:
        connection.execute(text(statements))


def nothing(*_: object) -> None:
    """Handle a message."""


STARTS: dict[str, tuple[str, Callable[[Engine], object]]] = {
    "worker": ("processed_message", lambda engine: make(MemorySource(), engine, nothing).start()),
    "ledger": ("message_lease", lambda engine: PostgresLedger("mailing", engine=engine).check()),
    "worker with a ledger": (
        "message_lease",
        lambda engine: make_with_ledger(
            MemorySource(), PostgresLedger("mailing", engine=engine), nothing, engine
        ).start(),
    ),
    "worker with both": (
        "message_lease",
        lambda engine: beside(engine, PostgresLedger("mailing", engine=engine), nothing).start(),
    ),
    "relay": ("outbox_relay", lambda engine: Relay(engine, {"own": RecordingPublisher()}).start()),
    "bulk load": ("processed_message", lambda engine: LoadLedger(engine).check()),
    "status": ("processed_message", read_status),
}


@pytest.mark.parametrize("part", STARTS)
def test_a_start_on_older_tables_is_refused_with_the_cure(older: Engine, part: str) -> None:
    table, start = STARTS[part]
    said = (
        rf"^table {table} is of an older version \(.*does not exist\); bring it up to date with `txbox db upgrade`, or"
    )
    with pytest.raises(SchemaMissing, match=said) as caught:
        start(older)
    assert caught.value.table == table


@pytest.mark.parametrize(("part", "table"), [("worker", "worker_report"), ("relay", "reported_activity")])
def test_a_start_without_what_it_only_writes_is_refused_with_the_cure(
    fresh_database: str, part: str, table: str
) -> None:
    upgrade_database(fresh_database)
    engine = create_engine(fresh_database)
    change(engine, "ALTER TABLE worker_report DROP oldest_sent_at; DROP TABLE reported_activity")
    with pytest.raises(SchemaMissing, match=rf"^table {table} .*`txbox db upgrade`, or in your own migrations"):
        STARTS[part][1](engine)
    engine.dispose()


def test_a_function_in_lambda_that_meets_older_tables_names_the_cure(older: Engine) -> None:
    change(older, "DROP VIEW processed_earlier")
    handle = sqs_handler(inbox=Inbox("billing"), engine=older, handler=nothing)
    with pytest.raises(TxboxError, match=r"(?s)does not exist.*`txbox db upgrade`"):
        handle(of("a"), Context(30))


def test_a_worker_whose_tables_are_taken_back_names_the_cure_and_waits_for_it(fresh_database: str) -> None:
    upgrade_database(fresh_database)
    engine = create_engine(fresh_database)
    kept, source = Kept(), MemorySource(messages("a"))
    with at_work(make(source, engine, nothing, hooks=[kept])):
        assert source.wait_until_empty(20)
        change(engine, "ALTER TABLE processed_message RENAME dead_letter_id TO gone")
        source.send(messages("a")[0])
        wait_until(lambda: kept.of(DatabaseLost))
        change(engine, "ALTER TABLE processed_message RENAME gone TO dead_letter_id")
        assert source.wait_until_empty(20)
    assert "`txbox db upgrade`" in str(kept.of(DatabaseLost)[0].error)
    assert kept.outcomes("a")[-1] is Outcome.DUPLICATE
    engine.dispose()


@pytest.mark.parametrize("statement", ["SELECT no_such_column FROM processed_message", "TABLE no_such_table"])
def test_a_handlers_own_statement_fails_its_message_only(engine: Engine, business: Business, statement: str) -> None:
    def handle(session: Session, _: Message) -> None:
        session.execute(text(statement))

    assert process(make(MemorySource(), engine, handle), delivery("a")) == [("a-1", Outcome.FAILED)]
    (said,) = business.rows("SELECT error FROM message_failure")
    assert "txbox db upgrade" not in said
