"""Topics: a message is published to every subscriber, or refused."""

from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine

from support.postgres.statements import run, statements_sent
from support.txbox.outbox import OWN
from support.txbox.traces import Traces, attributes
from txbox import InvalidConfiguration, NotSendable, Outbox, Outgoing, SchemaMissing
from txbox.outbox import Subscription, Subscriptions
from txbox.outbox.lanes import lane_of
from txbox.schema import tables

SOLD = "topic:sold"


@pytest.fixture
def subscriptions(engine: Engine) -> Subscriptions:
    """Two subscribers of ``topic:sold``."""
    subscriptions = Subscriptions(engine)
    assert subscriptions.add("sold", "billing")
    assert subscriptions.add(SOLD, "ein Lager")
    return subscriptions


def rows(engine: Engine, columns: str = "destination, message_id", place: str = "outbox_message") -> list[Any]:
    with engine.connect() as connection:
        return [tuple(row) for row in connection.exec_driver_sql(f"SELECT {columns} FROM {place} ORDER BY position")]


def to_each(*ids: str) -> set[tuple[str, str]]:
    return {(f"inbox:{subscriber}", id_) for id_ in ids for subscriber in ("billing", "ein Lager")}


@pytest.mark.usefixtures("subscriptions")
def test_each_subscriber_gets_a_message_once_as_if_it_were_published_to_it(engine: Engine) -> None:
    headers = {"tenant": "7"}
    with engine.begin() as connection:
        keyed = Outbox().publish(connection, SOLD, "body", key="ann", headers=headers, delay=3600)
        without = Outbox().publish(connection, SOLD, "other")
    found = rows(engine, "message_id, destination, key, headers, convert_from(body, 'UTF8'), lane, due_at > now()")
    assert sorted(found) == sorted(
        (id_, to, key, sent, body, lane_of(to, key, id_), due)
        for id_, key, sent, body, due in ((keyed, "ann", headers, "body", True), (without, None, {}, "other", None))
        for to in ("inbox:billing", "inbox:ein Lager")
    )


@pytest.mark.usefixtures("subscriptions")
def test_what_is_rolled_back_reaches_nobody(engine: Engine) -> None:
    with engine.connect() as connection:
        Outbox().publish(connection, SOLD, "")
        Outbox().publish_many(connection, [Outgoing(SOLD, ""), Outgoing(OWN, "")])
        connection.rollback()
    with engine.begin() as connection:
        kept = Outbox().publish(connection, SOLD, "")
        savepoint = connection.begin_nested()
        Outbox().publish(connection, SOLD, "")
        savepoint.rollback()
    assert set(rows(engine)) == to_each(kept)


@pytest.mark.usefixtures("subscriptions")
def test_many_messages_may_go_to_topics_and_elsewhere_in_their_order(engine: Engine) -> None:
    places = (SOLD, OWN, "inbox:billing", "topic:one")
    Subscriptions(engine).add("one", "billing")
    messages = [Outgoing(places[number % 4], str(number), key=f"k-{number % 3}") for number in range(2_000)]
    with engine.begin() as connection:
        ids = Outbox().publish_many(connection, messages)
    found = rows(engine, "destination, key, convert_from(body, 'UTF8')::int, message_id, lane")
    assert len(found) == 2_500
    assert {(number, id_) for _, _, number, id_, _ in found} == set(enumerate(ids))
    assert {lane == lane_of(to, key, id_) for to, key, _, id_, lane in found} == {True}
    for to, of in (("inbox:billing", (0, 2, 3)), ("inbox:ein Lager", (0,)), (OWN, (1,))):
        numbers = [number for destination, _, number, *_ in found if destination == to]
        assert numbers == [number for number in range(2_000) if number % 4 in of]


@pytest.mark.usefixtures("subscriptions")
def test_one_statement_each(engine: Engine) -> None:
    with engine.begin() as connection, statements_sent(engine) as statements:
        Outbox().publish(connection, SOLD, "")
        assert len(statements) == 1
        Outbox().publish_many(connection, [Outgoing(SOLD, ""), Outgoing(OWN, "")] * 200)
        assert len(statements) == 2
        Outbox().publish(connection, OWN, "")
        Outbox().publish_many(connection, [Outgoing(OWN, ""), Outgoing("inbox:x", "")])
    assert ["subscription" in statement for statement in statements[:4]] == [True, True, False, False]


@pytest.mark.usefixtures("subscriptions")
def test_a_topic_that_nobody_has_subscribed_to_is_refused_and_the_transaction_goes_on(engine: Engine) -> None:
    outbox = Outbox()
    told = r"^topic:no one has no subscribers, .*`txbox subscriptions add 'topic:no one' SUBSCRIBER` adds one$"
    with engine.begin() as connection:
        with pytest.raises(NotSendable, match=told) as refused:
            outbox.publish(connection, "topic:no one", "")
        assert refused.value.destination == "topic:no one"
        mixed = [Outgoing(SOLD, ""), Outgoing("topic:no one", ""), Outgoing(OWN, "")]
        with pytest.raises(NotSendable, match=told):
            outbox.publish_many(connection, mixed)
        kept = outbox.publish(connection, SOLD, "")
    assert set(rows(engine)) == to_each(kept)


@pytest.mark.parametrize("name", ["", " x", "x ", "\0", "ü" * 101])
def test_names_that_no_destination_can_have_are_refused(engine: Engine, name: str) -> None:
    for topic, subscriber in ((name, "billing"), ("sold", name)):
        with pytest.raises(InvalidConfiguration, match=r"^(topic|subscriber_id) "):
            Subscriptions(engine).add(topic, subscriber)
    with engine.begin() as connection, pytest.raises(NotSendable):
        Outbox().publish(connection, f"topic:{name}", "")


def test_the_longest_names(engine: Engine) -> None:
    name = "ü" * 100
    Subscriptions(engine).add(name, name)
    with engine.begin() as connection:
        published = Outbox().publish(connection, f"topic:{name}", "")
    assert rows(engine) == [(f"inbox:{name}", published)]


def test_subscriptions_are_added_once_listed_and_removed(engine: Engine, subscriptions: Subscriptions) -> None:
    assert not subscriptions.add("sold", "billing")
    assert subscriptions.add("paid", "billing")
    found = [(one.topic, one.subscriber_id) for one in subscriptions.list()]
    assert found == [("paid", "billing"), ("sold", "billing"), ("sold", "ein Lager")]
    assert isinstance(subscriptions.list()[0], Subscription)
    assert subscriptions.list()[0].added_at is not None
    assert subscriptions.remove(SOLD, "billing")
    assert not subscriptions.remove("sold", "billing")
    with engine.begin() as connection:
        published = Outbox().publish(connection, SOLD, "")
    assert rows(engine) == [("inbox:ein Lager", published)]


def test_schema_and_prefix_lead_elsewhere(engine: Engine) -> None:
    with engine.begin() as connection:
        schema = connection.exec_driver_sql("SELECT current_schema()").scalar_one()
        tables(schema, "Odd%_").metadata.create_all(connection)
    Subscriptions(engine, schema=schema, prefix="Odd%_").add("sold", "billing")
    outbox = Outbox(schema=schema, prefix="Odd%_")
    with engine.begin() as connection:
        one = outbox.publish(connection, SOLD, "")
        two = outbox.publish_many(connection, [Outgoing(SOLD, "")])
        with pytest.raises(NotSendable):
            Outbox().publish(connection, SOLD, "")
    assert rows(engine, place='"Odd%%_outbox_message"') == [("inbox:billing", id_) for id_ in (one, *two)]
    assert Subscriptions(engine).list() == ()


def test_tables_of_the_version_before_take_everything_else(engine: Engine) -> None:
    run(engine, "DROP TABLE subscription")
    with engine.begin() as connection:
        published = Outbox().publish(connection, OWN, "")
    for send in (lambda c: Outbox().publish(c, SOLD, ""), lambda c: Outbox().publish_many(c, [Outgoing(SOLD, "")])):
        with engine.begin() as connection, pytest.raises(SchemaMissing, match="table subscription does not exist"):
            send(connection)
    with pytest.raises(SchemaMissing, match="table subscription does not exist"):
        Subscriptions(engine).add("sold", "billing")
    assert rows(engine) == [(OWN, published)]


def test_a_subscription_counts_once_it_has_committed(engine: Engine, subscriptions: Subscriptions) -> None:
    """It neither waits for those who publish nor do they wait for it.

    ::

        publish 1 ────────── publish 2 ────────── publish 3 ── COMMIT
                  add third            COMMIT third
    """
    outbox, add = Outbox(), "INSERT INTO subscription (topic, subscriber_id, first_lane) VALUES ('sold', 'third', -64)"
    with engine.begin() as publishing, engine.connect() as adding:
        publishing.exec_driver_sql("SET LOCAL lock_timeout = '2s'")
        first = outbox.publish(publishing, SOLD, "")
        adding.exec_driver_sql(add)
        second = outbox.publish(publishing, SOLD, "")
        adding.commit()
        third = outbox.publish(publishing, SOLD, "")
        assert subscriptions.remove("sold", "ein Lager")
        (last,) = outbox.publish_many(publishing, [Outgoing(SOLD, "")])
    new = {("inbox:third", third), ("inbox:third", last), ("inbox:billing", last)}
    assert set(rows(engine)) == to_each(first, second, third) | new
    assert len(rows(engine)) == 9


@pytest.mark.usefixtures("subscriptions")
def test_at_repeatable_read_the_transaction_keeps_its_subscribers(engine: Engine) -> None:
    with engine.connect().execution_options(isolation_level="REPEATABLE READ") as connection, connection.begin():
        first = Outbox().publish(connection, SOLD, "")
        Subscriptions(engine).add("sold", "third")
        second = Outbox().publish(connection, SOLD, "")
    assert set(rows(engine)) == to_each(first, second)


@pytest.mark.usefixtures("subscriptions")
def test_a_topic_has_one_span_and_every_subscriber_its_context(engine: Engine) -> None:
    traces = Traces()
    with engine.begin() as connection:
        Outbox(tracing=traces.tracing).publish(connection, SOLD, "")
    (span,) = traces.all()
    context = span.get_span_context()
    assert context is not None
    traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    assert rows(engine, "headers") == [({"traceparent": traceparent},)] * 2
    assert attributes(span)["messaging.destination.name"] == "sold"


@pytest.mark.usefixtures("subscriptions")
def test_over_psycopgs_own_connection(engine: Engine, schema_url: str) -> None:
    with psycopg.connect(schema_url.replace("+psycopg", "")) as connection:
        published = Outbox().publish(connection, SOLD, "")
        with pytest.raises(NotSendable):
            Outbox().publish_many(connection, [Outgoing("topic:none", "")])
    assert set(rows(engine)) == to_each(published)
