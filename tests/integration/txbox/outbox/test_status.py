"""How the outbox stands, read from a real database: backlog, relays, what is kept; bounded, whatever there is."""

import re
from datetime import timedelta

import pytest
from sqlalchemy import Engine

from integration.txbox.conftest import StartRelay
from support.postgres.statements import run
from support.txbox.outbox import publish
from support.txbox.publishers import RecordingPublisher
from support.waiting import wait_until
from txbox import BrokerError, DeadLetter, DeadLetters, Reason, SchemaMissing
from txbox.backoff import Backoff
from txbox.outbox import Outgoing
from txbox.outbox.status import (
    STALE_SECONDS,
    DestinationStatus,
    OutboxStatus,
    OutboxStatusStatements,
    read_outbox_status,
    relays_at_work,
)
from txbox.relay import OutboxMessage, reporter
from txbox.status import read_status


def test_nothing_has_happened(engine: Engine) -> None:
    assert read_outbox_status(engine) == OutboxStatus()


def test_each_destination_has_a_line(engine: Engine) -> None:
    publish(
        engine,
        *(Outgoing("own:b", "1"), Outgoing("own:a", "1")),
        *(Outgoing("own:a", "2", delay=3600), Outgoing("own:c", "3", delay=3600)),
    )
    run(engine, "UPDATE outbox_message SET published_at = now() - interval '1 hour' WHERE due_at IS NOT NULL")
    run(engine, "UPDATE outbox_message SET published_at = now() - interval '1 min' WHERE destination = 'own:b'")
    found = read_outbox_status(engine)
    assert (found.messages, found.exact, found.in_time) == (4, True, True)
    a, b, c = found.destinations
    assert (a.destination, a.waiting, a.delayed, a.retrying) == ("own:a", 1, 1, 0)
    assert a.oldest_seconds is not None
    assert a.oldest_seconds < 50, "a message whose time has not come is not late"
    assert (b.destination, b.waiting, b.delayed, b.retrying) == ("own:b", 1, 0, 0)
    assert b.oldest_seconds is not None
    assert b.oldest_seconds >= 60
    assert (c.destination, c.waiting, c.delayed, c.oldest_seconds) == ("own:c", 0, 1, None)


@pytest.mark.parametrize("moment", ["infinity", "-infinity"])
def test_a_moment_that_never_was_is_no_age(engine: Engine, moment: str) -> None:
    publish(engine, Outgoing("own:a", "1"))
    run(engine, f"UPDATE outbox_message SET published_at = '{moment}'")
    [a] = read_outbox_status(engine).destinations
    assert (a.waiting, a.oldest_seconds) == (1, None)


def test_a_message_whose_time_has_come_waits_since_then(engine: Engine) -> None:
    publish(engine, Outgoing("own:a", "1", delay=1))
    run(
        engine,
        "UPDATE outbox_message SET published_at = now() - interval '1 day', due_at = now() - interval '2 minutes'",
    )
    (line,) = read_outbox_status(engine).destinations
    assert (line.waiting, line.delayed) == (1, 0)
    assert line.oldest_seconds is not None
    assert 120 <= line.oldest_seconds < 600


def test_what_is_refused_and_what_waits_behind_it_is_retrying(engine: Engine, start_relay: StartRelay) -> None:
    publish(
        engine,
        *(Outgoing("own:a", body, key="k") for body in ("refused", "behind it")),
        Outgoing("own:a", "refused"),
        Outgoing("own:a", "fine"),
    )
    broker = RecordingPublisher(lambda message: "no stock" if message.body == b"refused" else None)
    start_relay(broker, backoff=Backoff(first_seconds=600), listen=False)
    wait_until(lambda: read_outbox_status(engine).destinations[0].waiting == 0)
    (line,) = read_outbox_status(engine).destinations
    assert line.oldest_seconds is not None
    assert line == DestinationStatus(
        "own:a", retrying=3, oldest_seconds=line.oldest_seconds, most_attempts=1, error="no stock"
    )


def test_relays_report_themselves_until_they_end(engine: Engine, start_relay: StartRelay) -> None:
    relay = start_relay(RecordingPublisher(), keep_sent=timedelta(hours=1), listen=False)
    (line,) = wait_until(lambda: read_outbox_status(engine).relays, "the relay's first report")
    assert relay.stop()
    assert (line.relay_id, line.stale, line.sent) == (relay.relay_id, False, 0)
    assert line.seen_seconds_ago < STALE_SECONDS
    assert read_outbox_status(engine).relays == ()


def test_a_relay_that_was_killed_is_stale_and_its_rate_does_not_count(engine: Engine) -> None:
    run(
        engine,
        "INSERT INTO outbox_relay (relay_id, host, pid, sent, failed, sent_per_second, started_at, seen_at) VALUES "
        "('1', 'b', 1, 10, 2, 50, now() - interval '1 h', now() - interval '15 s'), "
        "('2', 'a', 2, 20, 0, 7.5, now() - interval '1 h', now())",
    )
    gone = 2**31 - 1  # no process has such a number
    run(
        engine,
        "INSERT INTO outbox_relay (relay_id, host, pid, sent_per_second, started_at, backend_pid) "
        f"VALUES ('3', 'c', 3, 70, now() - interval '1 h', {gone})",
    )
    found = read_outbox_status(engine)
    assert relays_at_work(engine) == 1
    assert [(line.host, line.pid, line.sent, line.failed, line.stale) for line in found.relays] == [
        ("a", 2, 20, 0, False),
        ("b", 1, 10, 2, True),
        ("c", 3, 0, 0, True),
    ]
    assert found.sent_per_second == 7.5


def test_a_relay_whose_session_was_ended_reports_from_its_next_one_at_once(
    engine: Engine, start_relay: StartRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter, "REPORT_SECONDS", 3_600.0)
    monkeypatch.setattr(reporter, "SOON_SECONDS", 3_600.0)
    start_relay(RecordingPublisher(), listen=False)
    wait_until(lambda: relays_at_work(engine) == 1, "its first report")
    with engine.begin() as connection:
        report = "SELECT backend_pid, pg_terminate_backend(backend_pid) FROM outbox_relay"
        before, ended = connection.exec_driver_sql(report).one()
    assert ended
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        session = "SELECT FROM outbox_relay WHERE backend_pid <> %s"
        wait_until(lambda: connection.exec_driver_sql(session, (before,)).rowcount == 1, "its next report")
    assert relays_at_work(engine) == 1


def test_a_relay_says_where_it_cannot_send_until_it_can(engine: Engine, start_relay: StartRelay) -> None:
    cured = False

    def refuse(_: OutboxMessage) -> None:
        if not cured:
            raise BrokerError("no such\n queue")

    start_relay(RecordingPublisher(refuse), listen=False)
    wait_until(lambda: read_outbox_status(engine).relays, "the relay's first report")
    publish(engine, Outgoing("own:a", "1"), Outgoing("other:b", "1"))
    a = wait_until(
        lambda: (one := read_outbox_status(engine).destinations)[-1].unreachable and one[0].unreachable and one
    )
    assert [(line.destination, line.unreachable_relays) for line in a] == [("other:b", 1), ("own:a", 1)]
    assert a[0].unreachable is not None
    assert a[0].unreachable.startswith("the relay has no publisher for 'other'")
    assert a[1].unreachable == "no such queue"
    cured = True
    wait_until(lambda: list(read_outbox_status(engine).relays[0].outages) == ["other:b"], "it was reached again")


def test_dead_letters_of_the_relay_belong_to_their_destination(engine: Engine) -> None:
    publish(engine, Outgoing("own:a", "1"))
    for destination in ("own:a", "own:b", "own:b"):
        letters = DeadLetters(engine)
        name = f"m{len(letters.list())}"
        letter = DeadLetter(f"txbox:outbox:{destination}", name, Reason.FAILED, "no", 1, destination, b"")
        with engine.begin() as connection:
            letters.park_in(connection, letter)  # as a relay does: no inbox knows its messages
    found = read_status(engine)
    assert found.subscribers == ()
    assert [(line.destination, line.waiting, line.dead_letters) for line in found.outbox.destinations] == [
        ("own:a", 1, 1),
        ("own:b", 0, 2),
    ]


def test_what_is_kept_is_counted(engine: Engine) -> None:
    run(
        engine,
        "INSERT INTO outbox_sent SELECT n::text, n, 'own:a', NULL, '{}', '', now(), now() - n * interval '1 min' "
        "FROM generate_series(1, 3) AS n",
    )
    found = read_outbox_status(engine)
    assert (found.kept_messages, found.kept_exact) == (3, True)
    with engine.connect() as connection:
        assert found.kept_since == connection.exec_driver_sql("SELECT min(sent_at) FROM outbox_sent").scalar_one()


# --- a backlog of any size -------------------------------------------------------------------------------------------


@pytest.fixture
def backlog(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> int:
    """More messages than are looked at: most in one lane of one destination, a few for another."""
    monkeypatch.setattr("txbox.outbox.status.COUNTED_MESSAGES", 100)
    publish(engine, *(Outgoing("own:big", "{}", key="k") for _ in range(300)))
    publish(engine, Outgoing("own:small", "{}"), Outgoing("own:small", "{}"))
    run(
        engine,
        "UPDATE outbox_message SET published_at = now() - interval '1 hour' "
        "WHERE position = (SELECT min(position) FROM outbox_message)",
    )
    run(engine, "ANALYZE outbox_message")
    return 302


def test_a_large_backlog_is_estimated_and_each_destination_is_seen(engine: Engine, backlog: int) -> None:
    found = wait_until(  # Postgres's own figures come a moment after the commit
        lambda: (one := read_outbox_status(engine)).messages == backlog and one, "Postgres has counted its rows"
    )
    assert (found.exact, found.in_time) == (False, True)
    big, small = found.destinations
    assert (big.destination, big.exact, small.destination, small.waiting) == ("own:big", False, "own:small", 2)
    assert 30 <= big.waiting <= 100, "a share of what may be looked at, for each lane"
    assert big.oldest_seconds is not None
    assert big.oldest_seconds >= 3600, "the oldest one is seen, wherever the rest is"


def test_no_statement_reads_all_of_a_large_backlog(engine: Engine, backlog: int) -> None:
    with engine.connect() as connection:
        sql = OutboxStatusStatements.load()
        for setting, statement, parameters in (
            (None, sql.backlog, {"limit": 101}),
            (sql.plan_by_index, sql.backlog_by_lane, {"lanes": 10_000, "limit": 100}),
        ):
            if setting:
                connection.exec_driver_sql(setting)
            plan = connection.exec_driver_sql(f"EXPLAIN (ANALYZE, TIMING OFF) {statement}", parameters).scalars().all()
            read = [
                float(found[1]) * int(found[2])
                for line in plan
                if " on outbox_message" in line and (found := re.search(r"rows=([\d.]+) loops=(\d+)\)", line))
            ]
            assert read, plan
            assert sum(read) <= 101 + 10, plan


def test_what_takes_too_long_is_left_out(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(engine, Outgoing("own:a", "1"))
    monkeypatch.setattr("txbox.outbox.status.STATEMENT_SECONDS", 0.05)
    with engine.connect() as holder:
        # A lock in the way takes as long as somebody likes; so may reading over what cannot be cleaned up.
        holder.exec_driver_sql("LOCK TABLE outbox_sent IN ACCESS EXCLUSIVE MODE")
        found = read_outbox_status(engine)
    # What is estimated may be what Postgres's statistics still know of the table's rows before they were emptied.
    assert (found.kept_exact, found.kept_since) == (False, None)
    assert (found.messages, found.exact, found.in_time) == (1, True, True)


def test_a_backlog_that_cannot_be_looked_at_in_time_is_told_as_far_as_it_is_known(
    engine: Engine, backlog: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sql = OutboxStatusStatements.load()
    for_ever = "SELECT pg_sleep(600) FROM generate_series(1, greatest(%(lanes)s, %(limit)s)) LIMIT 1"
    monkeypatch.setattr(sql, "backlog_by_lane", for_ever)
    monkeypatch.setattr("txbox.outbox.status.STATEMENT_SECONDS", 0.5)
    found = read_outbox_status(engine)
    assert (found.exact, found.in_time) == (False, False)
    assert [(line.destination, line.waiting, line.exact) for line in found.destinations] == [("own:big", 101, False)]
    monkeypatch.setattr(sql, "backlog", for_ever.replace("greatest(%(lanes)s, %(limit)s)", "%(limit)s"))
    found = read_outbox_status(engine)
    assert (found.exact, found.in_time, found.destinations) == (False, False, ())
    monkeypatch.setattr(sql, "relays", "SELECT pg_sleep(600) WHERE %(stale_after)s IS NOT NULL")
    assert not read_outbox_status(engine).relays_in_time


def test_nothing_is_read_beyond_the_limit_and_nothing_is_taken_for_nothing(engine: Engine, backlog: int) -> None:
    found = read_outbox_status(engine, limit_seconds=0)
    assert (found.in_time, found.relays_in_time, found.destinations, found.kept_exact) == (False, False, (), False)
    assert found.messages != 0


@pytest.mark.parametrize("table", ["outbox_message", "outbox_sent", "outbox_relay"])
def test_each_table_that_is_missing_is_named(table: str, engine: Engine) -> None:
    run(engine, f"DROP TABLE {table}")
    with pytest.raises(SchemaMissing) as raised:
        read_status(engine)
    assert raised.value.table == table
