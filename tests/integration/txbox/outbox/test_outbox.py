"""Publishing: a message commits with the business update, or not at all."""

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from support.postgres.statements import statements_sent
from support.txbox.outbox import OWN
from support.txbox.traces import Traces, attributes, parent
from txbox import (
    InvalidConfiguration,
    InvalidMessageId,
    MessageTooLarge,
    NotInTransaction,
    NotSendable,
    Outbox,
    Outgoing,
)
from txbox.messages.message import Message
from txbox.schema import tables


def rows(engine: Engine, columns: str = "message_id", *, place: str = "outbox_message") -> list[Any]:
    with engine.connect() as connection:
        found = connection.exec_driver_sql(f"SELECT {columns} FROM {place} ORDER BY position").all()
    return [row[0] if len(row) == 1 else tuple(row) for row in found]


def test_a_message_commits_with_its_transaction_and_vanishes_with_it(engine: Engine) -> None:
    outbox = Outbox()
    with engine.begin() as connection:
        committed = outbox.publish(connection, OWN, "one")
    with engine.connect() as connection:
        outbox.publish(connection, OWN, "two")
        connection.rollback()
    assert rows(engine) == [committed]


def test_a_savepoint_takes_its_messages_back(engine: Engine) -> None:
    outbox = Outbox()
    with engine.begin() as connection:
        kept = outbox.publish(connection, OWN, "kept")
        savepoint = connection.begin_nested()
        outbox.publish(connection, OWN, "lost")
        savepoint.rollback()
    assert rows(engine) == [kept]


@pytest.mark.parametrize("publish", [Outbox.publish, Outbox.publish_many])
def test_a_connection_that_commits_by_itself_is_refused(engine: Engine, publish: Callable[..., object]) -> None:
    arguments = (OWN, "one") if publish is Outbox.publish else ([],)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        with pytest.raises(NotInTransaction):
            publish(Outbox(), connection, *arguments)
        with pytest.raises(NotInTransaction):
            Outbox().check(connection)
    assert rows(engine) == []


def test_one_message_is_one_statement_and_so_are_many(engine: Engine) -> None:
    outbox = Outbox()
    with engine.begin() as connection, statements_sent(engine) as statements:
        outbox.publish(connection, OWN, "one")
        assert len(statements) == 1
        outbox.publish_many(connection, [Outgoing(OWN, str(number)) for number in range(500)])
        assert len(statements) == 2
        assert outbox.publish_many(connection, []) == []
        assert len(statements) == 2


def test_many_messages_keep_their_order_and_return_their_ids_in_it(engine: Engine) -> None:
    with engine.begin() as connection:
        published = Outbox().publish_many(connection, (Outgoing(OWN, str(number), key="a") for number in range(2_000)))
    assert rows(engine) == published
    assert published == sorted(set(published)), "ids that grow"
    assert rows(engine, "convert_from(body, 'UTF8')::int") == list(range(2_000))


def test_a_message_knows_the_transaction_that_published_it_savepoints_included(engine: Engine) -> None:
    with engine.begin() as connection:
        transaction = connection.exec_driver_sql("SELECT pg_current_xact_id()::text::bigint").scalar_one()
        Outbox().publish(connection, OWN, "one")
        with connection.begin_nested():
            Outbox().publish(connection, OWN, "two")
    assert rows(engine, "transaction_id") == [transaction, transaction]


@pytest.mark.parametrize("delay", [90, 90.0, timedelta(seconds=90)])
def test_a_delay_is_counted_by_the_databases_clock(engine: Engine, delay: Any) -> None:
    with engine.begin() as connection:
        Outbox().publish(connection, OWN, "one", delay=delay)
        Outbox().publish_many(connection, [Outgoing(OWN, "two", delay=delay)])
    waits = rows(engine, "extract(epoch FROM due_at - published_at)::float8")
    assert waits == [pytest.approx(90, abs=5)] * 2


def test_a_delay_may_be_a_moment(engine: Engine) -> None:
    moment = datetime(2037, 1, 2, 3, 4, 5, tzinfo=UTC)
    with engine.begin() as connection:
        Outbox().publish(connection, OWN, "one", delay=moment)
        Outbox().publish_many(connection, [Outgoing(OWN, "two", delay=moment), Outgoing(OWN, "three")])
    assert rows(engine, "due_at") == [moment, moment, None]


REFUSED: list[tuple[Any, type[Exception]]] = [
    (Outgoing("somewhere", ""), NotSendable),
    (Outgoing("own:", ""), NotSendable),
    (Outgoing("own:x\0", ""), NotSendable),
    (Outgoing("own:x ", ""), NotSendable),
    (Outgoing(f"own:{'x' * 2_000}", ""), NotSendable),
    (Outgoing(OWN, "", key=""), NotSendable),
    (Outgoing(OWN, "", key="\0"), NotSendable),
    (Outgoing(OWN, "", key="ü" * 513), NotSendable),
    (Outgoing(OWN, "", headers={"": "x"}), NotSendable),
    (Outgoing(OWN, "", headers={"x": "\0"}), NotSendable),
    (Outgoing(OWN, "", headers={"Message-Id": "mine"}), NotSendable),
    (Outgoing(OWN, "", headers={"x": 1}), TypeError),  # type: ignore[dict-item]
    (Outgoing(OWN, "", message_id=""), InvalidMessageId),
    (Outgoing(OWN, "", message_id="a\0b"), InvalidMessageId),
    (Outgoing(OWN, "", delay=-1), InvalidConfiguration),
    (Outgoing(OWN, "", delay=float("nan")), InvalidConfiguration),
    (Outgoing(OWN, "", delay=1e12), InvalidConfiguration),
    (Outgoing(OWN, "", delay="1h"), TypeError),  # type: ignore[arg-type]
    (Outgoing(OWN, "", delay=True), TypeError),
    (Outgoing(OWN, "", key=7), TypeError),  # type: ignore[arg-type]
    (Outgoing(OWN, "", headers=[("a", "b")]), TypeError),  # type: ignore[arg-type]
    (Outgoing(None, ""), TypeError),  # type: ignore[arg-type]
    (Outgoing("http://127.0.0.1/123456789012/q ", ""), NotSendable),
    (Outgoing("https://example.com/", ""), NotSendable),
    (("own:x", "a body"), TypeError),
    (Outgoing(OWN, "", delay=datetime(2030, 1, 1)), InvalidConfiguration),  # noqa: DTZ001 - that is the mistake
    (Outgoing("http://127.0.0.1/123456789012/q", "x" * 1_048_577), MessageTooLarge),
    (Outgoing(OWN, 7), TypeError),  # type: ignore[arg-type]
]


def test_what_cannot_be_sent_is_refused_when_it_is_published(engine: Engine) -> None:
    with engine.begin() as connection:
        for refused, error in REFUSED:
            with pytest.raises(error):
                Outbox().publish_many(connection, [Outgoing(OWN, "fine"), refused])
        published = Outbox().publish(connection, OWN, "the transaction goes on")
    assert rows(engine) == [published]


def test_schema_and_prefix_lead_elsewhere(engine: Engine) -> None:
    with engine.begin() as connection:
        schema = connection.exec_driver_sql("SELECT current_schema()").scalar_one()
        tables(schema, "Odd%_").metadata.create_all(connection)
    outbox = Outbox(schema=schema, prefix="Odd%_")
    with engine.begin() as connection:
        outbox.check(connection)
        published = [outbox.publish(connection, OWN, "one"), *outbox.publish_many(connection, [Outgoing(OWN, "two")])]
    assert rows(engine) == []
    assert rows(engine, place='"Odd%%_outbox_message"') == published


def test_the_trace_context_of_the_current_span_travels(engine: Engine) -> None:
    from opentelemetry.sdk.trace import TracerProvider

    with TracerProvider().get_tracer("test").start_as_current_span("sale") as span, engine.begin() as connection:
        Outbox().publish(connection, OWN, "one", headers={"tenant": "7"})
        Outbox().publish(connection, OWN, "two", headers={"traceparent": "mine"})
    with engine.begin() as connection:
        Outbox().publish(connection, OWN, "three")
    context = span.get_span_context()
    traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    assert rows(engine, "headers") == [{"tenant": "7", "traceparent": traceparent}, {"traceparent": "mine"}, {}]


def test_each_message_that_is_published_has_a_span_of_its_own(engine: Engine) -> None:
    traces = Traces()
    outbox = Outbox(tracing=traces.tracing)
    queue = "https://sqs.eu-central-1.amazonaws.com/123456789012/purchases"
    eight = {f"h{number}": "v" for number in range(8)}
    with traces.tracer.start_as_current_span("sale") as sale, engine.begin() as connection:
        outbox.publish(connection, queue, "one", message_id="m-1")
        outbox.publish_many(connection, [Outgoing(OWN, "two"), Outgoing(OWN, "3", headers={"traceparent": "mine"})])
        outbox.publish(connection, queue, "four", headers=eight)
    *created, _ = traces.all()
    assert created[0].name == "publish purchases"
    assert {parent(span) for span in created} == {sale.get_span_context().span_id}
    travelled = [headers.get("traceparent") for headers in rows(engine, "headers")]
    contexts = [span.get_span_context() for span in created]
    own = [f"00-{one.trace_id:032x}-{one.span_id:016x}-{one.trace_flags:02x}" for one in contexts if one is not None]
    # An SQS message has room for ten attributes, of which two are ours: the caller's eight come first.
    assert travelled == [own[0], own[1], "mine", None]
    assert attributes(created[0]) == {
        "messaging.system": "aws_sqs",
        "messaging.destination.name": "purchases",
        "messaging.operation.name": "publish",
        "messaging.operation.type": "create",
        "messaging.message.id": "m-1",
        "server.address": "sqs.eu-central-1.amazonaws.com",
    }


def test_publishers_do_not_wait_for_each_other(engine: Engine) -> None:
    with engine.begin() as slow:
        Outbox().publish(slow, OWN, "slow", key="a")
        with engine.begin() as quick:
            quick.exec_driver_sql("SET LOCAL lock_timeout = '2s'")
            published = Outbox().publish(quick, OWN, "quick", key="a")
        assert rows(engine) == [published]


def test_a_handler_publishes_in_its_own_transaction(engine: Engine) -> None:
    """Consume, process, produce: one commit. What a handler published before it failed is not sent."""
    from txbox import Inbox
    from txbox.backoff import Backoff
    from txbox_workers.memory_source import MemorySource
    from txbox_workers.worker import Worker

    failed = threading.Event()

    def bill(session: Session, message: Message) -> None:
        Outbox().publish(session, OWN, b"billed " + message.body, message_id=f"billed-{message.id}")
        if not failed.is_set():
            failed.set()
            raise RuntimeError("after it was published")

    source = MemorySource([Message("p-1", b"1"), Message("p-1", b"1")])
    worker = Worker(
        source, inbox=Inbox("billing"), engine=engine, handler=bill, backoff=Backoff(first_seconds=0, longest_seconds=0)
    )
    worker.start()
    assert source.wait_until_empty(timeout=20)
    worker.stop()
    assert rows(engine, "message_id, convert_from(body, 'UTF8')") == [("billed-p-1", "billed 1")]
