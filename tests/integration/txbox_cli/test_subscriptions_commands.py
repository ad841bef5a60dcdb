"""``txbox subscriptions``: who gets the messages of a topic."""

import json
from collections.abc import Callable

from sqlalchemy import Engine

from support.postgres.statements import run
from support.program import Ended
from txbox.outbox import Subscriptions

Txbox = Callable[..., Ended]


def test_they_are_added_listed_and_removed(txbox: Txbox, engine: Engine) -> None:
    assert (
        txbox("subscriptions", "list").out == "no subscriptions; `txbox subscriptions add TOPIC SUBSCRIBER` adds one\n"
    )
    assert txbox("subscriptions", "add", "sold", "billing").out == "subscribed: billing to topic:sold\n"
    assert txbox("subscriptions", "add", "topic:sold", "billing").out == "already subscribed: billing to topic:sold\n"
    added = json.loads(txbox("subscriptions", "add", "topic:sold", "a\nb", "--json").out)
    assert added == {"topic": "sold", "subscriber_id": "a\nb", "subscribed": True, "new": True}
    assert [(one.topic, one.subscriber_id) for one in Subscriptions(engine).list()] == [
        ("sold", "a\nb"),
        ("sold", "billing"),
    ]
    lines = txbox("subscriptions", "list").out.splitlines()
    assert [line.split()[:2] for line in lines] == [["topic", "subscriber"], ["sold", r"a\nb"], ["sold", "billing"]]
    listed = json.loads(txbox("subscriptions", "list", "--json").out)
    assert [one.keys() for one in listed] == [{"topic", "subscriber_id", "added_at"}] * 2
    assert txbox("subscriptions", "remove", "sold", "billing").out == "unsubscribed: billing to topic:sold\n"
    removed = json.loads(txbox("subscriptions", "remove", "sold", "a\nb", "--json").out)
    assert removed == {"topic": "sold", "subscriber_id": "a\nb", "subscribed": False}
    assert Subscriptions(engine).list() == ()


def test_errors_are_one_line_with_the_remedy(txbox: Txbox, engine: Engine) -> None:
    ended = txbox("subscriptions", "remove", "sold", "billing")
    told = "txbox: billing has not subscribed to sold; `txbox subscriptions list` shows who has\n"
    assert (ended.status, ended.out, ended.err) == (1, "", told)
    ended = txbox("subscriptions", "add", "sold ", "billing")
    assert ended.err.startswith("txbox: topic cannot begin or end with a blank")
    assert len(ended.err.splitlines()) == 1
    run(engine, "DROP TABLE subscription")
    for arguments in (("list",), ("add", "sold", "billing"), ("remove", "sold", "billing")):
        ended = txbox("subscriptions", *arguments)
        assert ended.status == 1
        assert ended.err.startswith("txbox: table subscription does not exist; ")
        assert "`txbox db upgrade`" in ended.err


def test_schema_and_prefix_lead_elsewhere(txbox: Txbox, engine: Engine) -> None:
    assert txbox("db", "upgrade", "--prefix", "other_").status == 0
    assert txbox("subscriptions", "add", "sold", "billing", "--prefix", "other_").status == 0
    assert Subscriptions(engine).list() == ()
    assert len(Subscriptions(engine, prefix="other_").list()) == 1
