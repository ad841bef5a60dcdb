"""The round trips of a batch: how many they are, and what is lost or doubled if a connection is lost on one."""

import threading
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, make_url

from integration.txbox.conftest import Left
from support.postgres.statements import run
from support.postgres.tcp_proxy import CountingProxy
from support.txbox.outbox import OWN, numbered, publish
from support.txbox.publishers import AsyncRecorder, RecordingPublisher
from support.waiting import wait_until
from txbox import Outgoing
from txbox.relay import Relay
from txbox.relay.async_publishers import EventLoop
from txbox.relay.pending import Claim
from txbox.relay.poller import MessageFinder
from txbox.relay.sender import RelayStatements


@pytest.fixture
def proxied(schema_url: str, proxy: CountingProxy) -> Iterator[Engine]:
    engine = create_engine(make_url(schema_url).set(host="127.0.0.1", port=proxy.port), pool_size=1, max_overflow=0)
    yield engine
    engine.dispose()


def look(engine: Engine) -> Claim:
    """Return a claim of everything, as a relay would have it."""
    with engine.connect() as connection:
        found = MessageFinder(connection, RelayStatements.load()).find()
    return Claim(found.fresh, found.due, found.server)


@pytest.mark.parametrize("keep_sent", [None, timedelta(hours=1)], ids=["deleted", "kept"])
def test_a_batch_is_two_round_trips(
    engine: Engine, proxied: Engine, proxy: CountingProxy, left: Left, keep_sent: timedelta | None
) -> None:
    trips: list[int] = []
    broker = RecordingPublisher(before=lambda _: trips.append(proxy.packets))
    sender = Relay(proxied, {"own": broker}, keep_sent=keep_sent)._sender
    for number in range(4):  # the first one connects
        publish(engine, *numbered(10, key="a" if number % 2 else None))
        claim, before = look(engine), proxy.packets
        trips.clear()
        assert len(sender.send(claim).settlement.sent) == 10
        assert left() == []
    assert [at - before for at in (*trips, proxy.packets)] == [1] * 10 + [2]


def test_a_look_is_one_round_trip(engine: Engine, proxied: Engine, proxy: CountingProxy) -> None:
    with proxied.connect() as connection:
        finder = MessageFinder(connection, RelayStatements.load())
        finder.find()
        for _ in range(10):  # the fifth prepares the statement
            finder.find()
        publish(engine, *numbered(2))
        before = proxy.packets
        assert finder.find().messages == 2
        assert not finder.find()
        assert proxy.packets - before == 2


def test_an_async_senders_claims_one_after_the_other_share_a_session(
    engine: Engine, proxy: CountingProxy, left: Left, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txbox.relay.async_sender.SPARE_SECONDS", 60.0)
    url = make_url(engine.url).set(host="127.0.0.1", port=proxy.port)
    own = create_engine(url)
    trips: list[int] = []
    broker = AsyncRecorder()
    relay = Relay(own, {"own": broker}, listen=False)
    sender = relay._new_async_sender(EventLoop([broker], enter_seconds=60.0))
    scheduler = relay._scheduler
    loop = threading.Thread(target=sender._loop.run)
    loop.start()
    wait_until(lambda: sender._loop.is_ready, "the loop")
    for _ in range(4):
        publish(engine, *numbered(10))
        claim = look(engine)
        before = proxy.packets
        scheduler.add(claim.fresh, claim.due, server=claim.server, everything=True)
        while left():
            sender._work()
        trips.append(proxy.packets - before)
    # Claim and read; begin, and settle with COMMIT; release. The first one begins the session, and prepares.
    assert trips[1:] == [4, 4, 4]
    scheduler.close()
    sender.run()
    loop.join()
    own.dispose()


def test_a_batch_of_more_lanes_than_are_free_reads_those_that_are(engine: Engine, left: Left) -> None:
    broker = RecordingPublisher()
    sender = Relay(engine, {"own": broker})._sender
    publish(engine, *[Outgoing(OWN, str(number), key=f"k{number}") for number in range(10)])
    claim = look(engine)
    taken = dict(list(claim.fresh.items())[:3])
    sql = RelayStatements.load()
    with engine.connect() as other:
        parameters = {"idle_timeout_milliseconds": "60000", "lanes": list(taken)}
        other.exec_driver_sql(sql.claim, parameters)
        result = sender.send(claim)
        assert result.locked == taken.keys()
        assert result.fresh == taken
        assert not {row.lane for row in result.settlement.sent} & taken.keys()
        assert len(left()) + len(broker.received) == 10
    sender.send(Claim(result.fresh, server=claim.server))
    assert left() == []
    assert sorted(broker.bodies) == [str(number) for number in range(10)]


@pytest.mark.parametrize(
    ("marker", "reaches_server", "arrivals"),
    [(b"txbox.lanes", False, 1), (b"txbox.lanes", True, 1), (b"DELETE", False, 2), (b"DELETE", True, 1)],
    ids=["claim is lost", "answer to claim is lost", "settlement is lost", "answer to settlement is lost"],
)
def test_a_connection_lost_on_a_round_trip_loses_nothing_and_sends_again_only_what_was_not_settled(
    engine: Engine,
    proxied: Engine,
    proxy: CountingProxy,
    left: Left,
    marker: bytes,
    reaches_server: bool,
    arrivals: int,
) -> None:
    broker = RecordingPublisher()
    sender = Relay(proxied, {"own": broker})._sender
    publish(engine, *numbered(5, key="a"))
    claim = look(engine)
    proxy.lose_next(marker, reaches_server=reaches_server)
    with pytest.raises(psycopg.OperationalError):
        sender.send(claim)
    assert proxy.lost == 1
    assert proxied.pool.checkedout() == 0  # type: ignore[attr-defined] # a QueuePool's
    sender.send(look(engine) if left() else claim)
    assert left() == []
    assert set(Counter(message.id for message in broker.received).values()) == {arrivals}


def test_statements_that_the_host_has_discarded_are_prepared_again_and_nothing_is_sent_twice(
    engine: Engine, proxied: Engine, left: Left
) -> None:
    broker = RecordingPublisher()
    sender = Relay(proxied, {"own": broker})._sender
    for number in range(3):
        publish(engine, *numbered(5, first=5 * number))
        sender.send(look(engine))
        run(proxied, "DEALLOCATE ALL")
    assert left() == []
    assert sorted(map(int, broker.bodies)) == list(range(15))
    with proxied.connect() as connection:
        state = "SELECT state, backend_xmin FROM pg_stat_activity WHERE pid = %s"
        pid = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
        connection.rollback()
        with engine.connect() as other:
            assert tuple(other.exec_driver_sql(state, (pid,)).one()) == ("idle", None)
