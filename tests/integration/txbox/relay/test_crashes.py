"""Crashes of the server: what a relay has settled or remembers is undone or outdated, and each key keeps its order."""

import threading
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.exc import DBAPIError

from integration.txbox.conftest import BOTH_KINDS, StartRelay
from support.postgres.crashes import crashing_server, kill_a_backend, stop_immediately
from support.txbox.outbox import OWN, publish
from support.txbox.publishers import RecordingPublisher, first_arrivals
from support.waiting import wait_until
from txbox import Outgoing
from txbox.backoff import Backoff
from txbox.relay import OutboxMessage
from txbox.schema import tables
from txbox_local import LocalPostgres

pytestmark = pytest.mark.chaos

TRIALS = 5
KEYS = 6
MESSAGES = 10


@pytest.fixture
def server() -> Iterator[LocalPostgres]:
    with crashing_server() as server:
        yield server


@pytest.fixture
def make_engine(server: LocalPostgres) -> Iterator[Callable[..., Engine]]:
    """Make an engine on that server: make_engine(**options)."""
    engines: list[Engine] = []

    def make(**options: bool) -> Engine:
        engines.append(create_engine(server.url, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.dispose()


def run_of(engine: Engine) -> object:
    """Return which run of the server answers; None: none does. For a moment after the crash, it is the one before."""
    try:
        with engine.connect() as connection:
            run = "SELECT (pg_postmaster_start_time(), pg_stat_get_bgwriter_stat_reset_time())::text"
            return connection.exec_driver_sql(run).scalar_one()
    except DBAPIError:
        return None


@pytest.mark.parametrize(
    ("crash", "max_attempts", "pre_ping"),
    [
        pytest.param(stop_immediately, None, False, id="held"),
        pytest.param(kill_a_backend, 1, False, id="parked"),
        pytest.param(stop_immediately, 1, True, id="parked, and lost connections are replaced silently"),
    ],
)
@BOTH_KINDS
def test_a_crash_of_the_server_lets_no_message_of_a_key_overtake_another(
    server: LocalPostgres,
    make_engine: Callable[..., Engine],
    start_relay: StartRelay,
    crash: Callable[[LocalPostgres, int], None],
    max_attempts: int | None,
    pre_ping: bool,
) -> None:
    refused_once: set[str] = set()
    some_are_held = threading.Event()

    def refuse_the_first_once(message: OutboxMessage) -> str | None:
        """Or, where nothing is parked, until it was seen that some are held."""
        if not message.body.endswith(b"-0"):
            return None
        if message.id in refused_once and (max_attempts is not None or some_are_held.is_set()):
            return None
        refused_once.add(message.id)
        return "later"

    engine, watching = make_engine(pool_pre_ping=pre_ping), make_engine(pool_pre_ping=True)
    with engine.begin() as connection:
        tables().metadata.create_all(connection)
    broker = RecordingPublisher(refuse_the_first_once)
    backoff = Backoff(first_seconds=0.4, longest_seconds=0.4)
    start_relay(broker, engine=engine, max_attempts=max_attempts, backoff=backoff, batch_size=2, senders=3)

    def count(of: str) -> int:
        with watching.connect() as connection:
            return int(connection.exec_driver_sql(f"SELECT count(*) FROM {of}").scalar_one())

    for trial in range(TRIALS):
        keys = [f"{trial}:{number}" for number in range(KEYS)]
        with watching.connect() as connection:
            backend = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
        parked = 0 if max_attempts is None else count("dead_letter")
        some_are_held.clear()
        publish(watching, *[Outgoing(OWN, f"{key}-{n}", key=key) for n in range(MESSAGES) for key in keys])
        if max_attempts is None:
            wait_until(lambda: count("outbox_message WHERE held") > KEYS, "some are held", every=0.0)
        else:
            wait_until(lambda: count("dead_letter") > parked + 1, "some are parked", every=0.0)  # noqa: B023
        some_are_held.set()
        before = run_of(watching)
        crash(server, backend)
        wait_until(lambda: run_of(watching) not in (None, before), "it is up again", timeout=60)  # noqa: B023
        wait_until(lambda: count("outbox_message") == 0, "an empty outbox", timeout=60)
    for key, bodies in first_arrivals(broker.received).items():
        assert bodies == sorted(bodies), f"the order of {key}"
    if max_attempts is None:
        assert len({message.id for message in broker.received}) == TRIALS * KEYS * MESSAGES
