"""What was sent and is kept, in a real database: found, and published again as it was."""

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine

from integration.txbox.conftest import StartRelay
from support.postgres.statements import run
from support.postgres.tables import make_tables
from support.txbox.outbox import publish
from support.txbox.publishers import RecordingPublisher
from support.waiting import wait_until
from txbox import InvalidConfiguration, SchemaMissing
from txbox.outbox import Outgoing
from txbox.outbox.sent_messages import SentFilter, SentMessages

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def keep(
    engine: Engine,
    position: int,
    *,
    minutes: float = 0,
    destination: str = "own:x",
    key: str | None = None,
    message_id: str | None = None,
) -> str:
    """Leave a message behind as a relay does, sent at a time of the test's choosing."""
    message_id = message_id or f"m-{position}"
    run(
        engine,
        "INSERT INTO outbox_sent (message_id, position, destination, key, headers, body, published_at, sent_at) "
        'VALUES (%s, %s, %s, %s, \'{"n": "1"}\', %s, %s, %s)',
        (message_id, position, destination, key, b"\x00\xff", NOON, NOON + timedelta(minutes=minutes)),
    )
    return message_id


def outbox_rows(engine: Engine) -> list[tuple[object, ...]]:
    with engine.connect() as connection:
        found = connection.exec_driver_sql(
            "SELECT message_id, destination, key, headers, body FROM outbox_message ORDER BY position"
        )
        return [tuple(row) for row in found]


def test_what_a_relay_keeps_is_sent_again_as_it_was(engine: Engine, start_relay: StartRelay) -> None:
    broker = RecordingPublisher()
    publish(
        engine, *(Outgoing("own:x", b"\x00%d" % number, key="k", headers={"h": str(number)}) for number in range(5))
    )
    kept = SentMessages(engine)
    start_relay(broker, keep_sent=timedelta(hours=1), listen=False)
    wait_until(lambda: len(kept.find()) == 5, "all are sent and kept")
    for chunk in kept.plan_replay():
        assert kept.replay(chunk) == 5
    wait_until(lambda: len(kept.find()) == 10, "all are sent again and kept")
    first, again = broker.received[:5], broker.received[5:]
    assert [(message.id, message.body, message.key, message.headers) for message in again] == [
        (message.id, message.body, message.key, message.headers) for message in first
    ]


def test_the_last_that_was_sent_is_found_first(engine: Engine) -> None:
    keep(engine, 1, minutes=5)
    keep(engine, 2, minutes=0, key="k", destination="own:y")
    keep(engine, 3, minutes=5)
    found = SentMessages(engine).find()
    assert [message.position for message in found] == [3, 1, 2]
    last = found[-1]
    assert (last.message_id, last.destination, last.key, last.headers) == ("m-2", "own:y", "k", {"n": "1"})
    assert (last.published_at, last.sent_at, last.size, last.body) == (NOON, NOON, 2, None)
    assert [message.body for message in SentMessages(engine).find(limit=2, bodies=True)] == [b"\x00\xff"] * 2
    assert "xff" not in repr(SentMessages(engine).find(limit=1, bodies=True))


FILTERS = [
    (SentFilter(destination="own:y"), [2]),
    (SentFilter(key="k"), [2, 4]),
    (SentFilter(key="k", destination="own:x"), [4]),
    (SentFilter(message_id="m-3"), [3]),
    (SentFilter(since=NOON + timedelta(minutes=3)), [3, 4]),
    (SentFilter(until=NOON + timedelta(minutes=3)), [1, 2]),
    (SentFilter(since=NOON + timedelta(minutes=2), until=NOON + timedelta(minutes=4)), [2, 3]),
    (SentFilter(since=timedelta(days=100_000)), [1, 2, 3, 4]),
    (SentFilter(since=timedelta(minutes=1)), []),
    (SentFilter(until=timedelta(minutes=1)), [1, 2, 3, 4]),
    (SentFilter(after=2), [3, 4]),
    (SentFilter(message_id="none"), []),
]


def test_filters_are_the_same_for_looking_and_for_replaying(engine: Engine) -> None:
    keep(engine, 1, minutes=1)
    keep(engine, 2, minutes=2, key="k", destination="own:y")
    keep(engine, 3, minutes=3)
    keep(engine, 4, minutes=4, key="k")
    # Far in the past by the database's clock: "a minute ago" is after all of them.
    with engine.begin() as connection:
        assert connection.exec_driver_sql("SELECT now() > %s::timestamptz", (NOON,)).scalar_one()
    kept = SentMessages(engine)
    for which, positions in FILTERS:
        assert sorted(message.position for message in kept.find(which)) == positions, which
        chunks = kept.plan_replay(which)
        assert sum(chunk.messages for chunk in chunks) == len(positions)
        assert sum(kept.replay(chunk, which) for chunk in chunks) == len(positions)
        assert [row[0] for row in outbox_rows(engine)] == [f"m-{position}" for position in positions], which
        run(engine, "DELETE FROM outbox_message")


def test_chunks_keep_the_order_in_which_messages_were_published(engine: Engine) -> None:
    """Also where a refused message was sent long after those behind it, and where others of the table are between."""
    for position in range(1, 11):
        keep(engine, position, minutes=60 if position == 2 else position, key=f"k{position % 2}")
    kept = SentMessages(engine)
    chunks = kept.plan_replay(chunk_messages=3)
    assert [(chunk.messages, chunk.first, chunk.last) for chunk in chunks] == [
        (3, 1, 3),
        (3, 4, 6),
        (3, 7, 9),
        (1, 10, 10),
    ]
    assert [kept.replay(chunk) for chunk in chunks] == [3, 3, 3, 1]
    assert [row[0] for row in outbox_rows(engine)] == [f"m-{position}" for position in range(1, 11)]


def test_a_replay_does_not_send_its_own_copies_nor_what_is_gone(engine: Engine) -> None:
    for position in range(1, 5):
        keep(engine, position, minutes=position)
    kept = SentMessages(engine)
    chunks = kept.plan_replay(chunk_messages=2)
    keep(engine, 99, minutes=2)  # sent since, such as a copy of the first chunk
    run(engine, "DELETE FROM outbox_sent WHERE position = 4")
    assert [kept.replay(chunk) for chunk in chunks] == [2, 1]
    assert [row[0] for row in outbox_rows(engine)] == ["m-1", "m-2", "m-3"]


def test_each_message_is_sent_again_once_however_often_it_was(engine: Engine) -> None:
    """Copies stand between the messages of a chunk, and behind a replay that goes on."""
    for position in (1, 2, 9):
        keep(engine, position, minutes=position)
    for position, copy_of in ((5, 1), (6, 2), (10, 9)):
        keep(engine, position, minutes=position, message_id=f"m-{copy_of}")
    keep(engine, 7, minutes=7, message_id="m-1", destination="own:y")  # one id, two destinations: two messages
    kept = SentMessages(engine)
    (chunk,) = kept.plan_replay()
    assert (chunk.messages, chunk.copies, chunk.first, chunk.last) == (4, 3, 1, 9)
    assert kept.replay(chunk) == 4
    assert [row[:2] for row in outbox_rows(engine)] == [
        ("m-1", "own:x"),
        ("m-2", "own:x"),
        ("m-1", "own:y"),
        ("m-9", "own:x"),
    ]
    assert [chunk.messages for chunk in kept.plan_replay(SentFilter(after=1), chunk_messages=1)] == [1, 1, 1]
    (chunk,) = kept.plan_replay(SentFilter(since=NOON + timedelta(minutes=4), destination="own:x"))
    assert (chunk.messages, kept.replay(chunk, SentFilter(destination="own:x"))) == (3, 3), "the first of those meant"


def test_pages_go_by_time_and_position(engine: Engine) -> None:
    for position in range(1, 6):
        keep(engine, position, minutes=5 if position == 1 else 0)
    kept = SentMessages(engine)
    seen: list[int] = []
    page = kept.find(limit=2)
    while page:
        seen += [message.position for message in page]
        page = kept.find(limit=2, before=(page[-1].sent_at, page[-1].position))
    assert seen == [1, 5, 4, 3, 2]


def test_whether_anything_is_kept(engine: Engine) -> None:
    assert SentMessages(engine).is_empty()
    keep(engine, 1)
    assert not SentMessages(engine).is_empty()


def test_a_chunk_is_published_whole_or_not_at_all(engine: Engine) -> None:
    keep(engine, 1)
    keep(engine, 2, destination="no destination")
    kept = SentMessages(engine)
    (chunk,) = kept.plan_replay()
    with pytest.raises(Exception, match="is not a destination"):
        kept.replay(chunk)
    assert outbox_rows(engine) == []


def test_what_cannot_be_asked(engine: Engine) -> None:
    with pytest.raises(InvalidConfiguration, match=r"SentFilter\.until needs a zone"):
        SentFilter(until=datetime(2026, 3, 1))  # noqa: DTZ001 - the point
    with pytest.raises(InvalidConfiguration, match="chunk_messages must be at least 1, not 0"):
        SentMessages(engine).plan_replay(chunk_messages=0)


def test_schema_and_prefix_with_every_odd_character(fresh_engine: Engine) -> None:
    schema, prefix = 'Odd "schema" 100%', "Tx 5%_"
    make_tables(fresh_engine, schema, prefix)
    run(
        fresh_engine,
        'INSERT INTO "Odd ""schema"" 100%%"."Tx 5%%_outbox_sent" '
        "SELECT 'm', 1, 'own:x', NULL, '{}', '', now(), now()",
    )
    kept = SentMessages(fresh_engine, schema=schema, prefix=prefix)
    (chunk,) = kept.plan_replay()
    assert (len(kept.find()), kept.replay(chunk)) == (1, 1)
    with pytest.raises(SchemaMissing) as raised:
        SentMessages(fresh_engine).find()
    assert raised.value.table == "outbox_sent"
