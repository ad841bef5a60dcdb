"""A database or a role may have settings by which the server writes and reads values in other ways."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine, create_engine, make_url

from integration.txbox.conftest import StartRelay
from support.txbox.outbox import OUTBOX, OWN, numbered, publish
from support.txbox.publishers import RecordingPublisher
from support.waiting import wait_until
from txbox import DeadLetter, DeadLetters, Failures, Inbox, Reason
from txbox.leases import PostgresLedger
from txbox.leases.lease import elapsed
from txbox.outbox.sent_messages import SentMessages
from txbox.status import read_status
from txbox_workers.processing.deadlocks import ConflictStatements

SETTINGS = [
    "datestyle=SQL,DMY",
    "datestyle=German",
    "datestyle=Postgres,MDY intervalstyle=postgres_verbose bytea_output=escape standard_conforming_strings=off",
    "datestyle=ISO,YMD intervalstyle=sql_standard timezone=<+0545>-05:45 extra_float_digits=-15",
    "intervalstyle=iso_8601 lc_monetary=C escape_string_warning=off timezone=Asia/Kathmandu",
]


@pytest.fixture(params=SETTINGS)
def unusual(request: pytest.FixtureRequest, schema_url: str) -> Iterator[Engine]:
    """An engine whose sessions have these settings from their start, as by ALTER DATABASE or ALTER ROLE."""
    url = make_url(schema_url)
    options = " ".join([str(url.query["options"]), *(f"-c{setting}" for setting in request.param.split())])
    engine = create_engine(url.update_query_dict({"options": options}))
    yield engine
    engine.dispose()


def is_recent(moment: datetime | None) -> bool:
    return moment is not None and abs(datetime.now(UTC) - moment) < timedelta(minutes=5)


def test_messages_are_sent_kept_and_sent_again(unusual: Engine, start_relay: StartRelay) -> None:
    broker = RecordingPublisher(lambda message: "no" if message.body == b"no" else None, final=True)
    start_relay(broker, engine=unusual, senders=2, keep_sent=timedelta(hours=1))
    publish(unusual, *numbered(3, key="k"))
    with unusual.begin() as connection:
        OUTBOX.publish(connection, OWN, b"later", delay=0.1)
        OUTBOX.publish(connection, OWN, b"no")
        OUTBOX.publish(connection, OWN, bytes(range(256)), headers={"h": "a\\b'c"})
    broker.wait_for(5)
    assert all(is_recent(message.published_at) for message in broker.received)
    assert bytes(range(256)) in [message.body for message in broker.received]
    wait_until(lambda: read_status(unusual).outbox.kept_messages == 5, "all to be kept")
    outbox = read_status(unusual).outbox
    assert is_recent(outbox.kept_since)
    assert [is_recent(one.started_at) for one in outbox.relays] == [True]
    sent = SentMessages(unusual)
    found = sent.find(limit=3)
    rest = sent.find(before=(found[-1].sent_at, found[-1].position))
    assert len({message.position for message in [*found, *rest]}) == 5
    assert all(is_recent(message.sent_at) and is_recent(message.published_at) for message in found)
    (chunk,) = sent.plan_replay()
    assert sent.replay(chunk) == 5
    broker.wait_for(10)
    (letter,) = DeadLetters(unusual).list()
    assert is_recent(letter.parked_at)
    assert letter.redriven_at is None


def test_inbox_ledger_and_dead_letters_work(unusual: Engine) -> None:
    with unusual.begin() as connection:
        assert Inbox("billing").record(connection, "m1")
    failures = Failures(unusual, "billing")
    failures.fail("m2", ValueError("no"))
    assert failures.fail("m2", ValueError("no")).attempts == 2
    with unusual.begin() as connection:
        counted = {"subscriber_id": "billing", "sqlstate": "40P01", "relation": "stock", "conflicts": 1}
        connection.exec_driver_sql(ConflictStatements.load().count_conflicts, counted)
    letters = DeadLetters(unusual)
    number = letters.park(DeadLetter("billing", "m3", Reason.FAILED, "error", 1, "queue", bytes(range(256))))
    letters.redrive(number, lambda _: None)
    letter = letters.get(number)
    assert (is_recent(letter.parked_at), is_recent(letter.redriven_at)) == (True, True)
    assert letter.body == bytes(range(256))
    letters.park(DeadLetter("billing", "m4", Reason.FAILED, "error", 1, "queue", b"{}"))
    ledger = PostgresLedger("mailing", engine=unusual)
    lease = ledger.acquire("m1").lease
    assert lease is not None
    ledger.renew(lease)
    known = ledger._clock.latest(elapsed())
    assert known is not None
    assert abs(known - time.time()) < 60, "the server's time is not rounded"
    assert ledger.acquire("m1").lease is None
    ledger.complete(lease, bytes(range(256)))
    assert ledger.acquire("m1").result == bytes(range(256))
    status = read_status(unusual)
    (line,) = status.subscribers
    assert (is_recent(line.last_processed_at), is_recent(line.oldest_dead_letter_at)) == (True, True)
    (conflict,) = status.conflicts
    assert (is_recent(conflict.first_at), is_recent(conflict.last_at)) == (True, True)
