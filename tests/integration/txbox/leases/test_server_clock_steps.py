"""The database's clock is set while leases are out: a ``clock_timestamp()`` of the test's goes before the server's."""

from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Engine, create_engine, make_url

from support.postgres.statements import run
from support.txbox.leases import acquired
from support.waiting import wait_until
from txbox import LeaseLost
from txbox.leases import LeaseState, PostgresLedger

HOUR = 3600.0

SetClock = Callable[[float], None]


@pytest.fixture
def set_clock(engine: Engine) -> SetClock:
    """Set the clock by so many seconds: set_clock(3600)."""

    def set_by(seconds: float) -> None:
        run(engine, "UPDATE clock_step SET seconds = %s", (seconds,))

    run(
        engine,
        "CREATE TABLE clock_step AS SELECT 0::double precision AS seconds; "
        "CREATE FUNCTION clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE AS $$"
        "SELECT pg_catalog.clock_timestamp() + make_interval(secs => seconds) FROM clock_step$$",
    )
    return set_by


@pytest.fixture
def stepped(schema_url: str, set_clock: SetClock) -> Iterator[Engine]:
    """An engine for whose statements the test's clock goes before the server's."""
    url = make_url(schema_url)
    engine = create_engine(url.update_query_dict({"options": f"{url.query['options']},pg_catalog"}))
    yield engine
    engine.dispose()


def test_who_knew_the_clock_takes_over_nothing_when_it_is_set_forward(
    stepped: Engine, set_clock: SetClock, caplog: pytest.LogCaptureFixture
) -> None:
    owner, other = PostgresLedger("mailing", engine=stepped), PostgresLedger("mailing", engine=stepped)
    lease = acquired(owner, "m", lease_seconds=30)
    acquired(other, "another message")
    set_clock(HOUR)
    for _ in range(3):
        found = other.acquire("m", lease_seconds=30)
        assert found.state is LeaseState.IN_FLIGHT
        assert 0 < found.seconds_left <= 31
    acquired(other, "a free message")
    assert [record.message for record in caplog.records if "went forward by 3600 s" in record.message]
    # By the clock as it is now.
    owner.renew(lease)
    assert lease.seconds_left > 20
    assert PostgresLedger("mailing", engine=stepped).acquire("m").state is LeaseState.IN_FLIGHT
    owner.complete(lease)


def test_after_the_length_of_a_lease_the_new_time_is_the_time(stepped: Engine, set_clock: SetClock) -> None:
    owner, other = PostgresLedger("mailing", engine=stepped), PostgresLedger("mailing", engine=stepped)
    acquired(owner, "m", lease_seconds=HOUR / 2)
    acquired(other, "another message")
    set_clock(HOUR)
    assert other.acquire("m", lease_seconds=0.2).state is LeaseState.IN_FLIGHT
    wait_until(lambda: other.acquire("m", lease_seconds=0.2).state is LeaseState.ACQUIRED, "it is taken over")


def test_who_did_not_know_the_clock_takes_over_and_both_are_told(
    stepped: Engine, set_clock: SetClock, caplog: pytest.LogCaptureFixture
) -> None:
    """What cannot be prevented: nothing that a new process can see tells it that the clock was set."""
    owner = PostgresLedger("mailing", engine=stepped)
    lease, another = acquired(owner, "m", lease_seconds=30), acquired(owner, "another message", lease_seconds=30)
    set_clock(HOUR)
    taken_over = acquired(PostgresLedger("mailing", engine=stepped), "m", lease_seconds=30)
    assert taken_over.unknown_attempts == 1
    with pytest.raises(LeaseLost):
        owner.renew(lease)
    assert not lease.seconds_left
    owner.renew(another)
    assert [record.message for record in caplog.records if "went forward by 3600 s" in record.message]


def test_a_clock_that_is_set_back_blocks_no_message_for_longer_than_two_leases(
    stepped: Engine, set_clock: SetClock, caplog: pytest.LogCaptureFixture
) -> None:
    dead, knew = PostgresLedger("mailing", engine=stepped), PostgresLedger("mailing", engine=stepped)
    acquired(knew, "another message")
    acquired(dead, "m", lease_seconds=0.5)
    set_clock(-HOUR)
    new = PostgresLedger("mailing", engine=stepped)
    found = new.acquire("m")
    assert (found.state, found.seconds_left) == (LeaseState.IN_FLIGHT, 0.5)
    wait_until(lambda: new.acquire("m").state is LeaseState.ACQUIRED, "its lease is over")
    assert [record.message for record in caplog.records if "the database's clock was set back" in record.message]
    acquired(knew, "a free message")
    assert [record.message for record in caplog.records if "clock was set back by 3600 s" in record.message]


def test_an_owner_that_lives_keeps_its_message_when_the_clock_is_set_back(stepped: Engine, set_clock: SetClock) -> None:
    owner, other = PostgresLedger("mailing", engine=stepped), PostgresLedger("mailing", engine=stepped)
    lease = acquired(owner, "m", lease_seconds=30)
    set_clock(-HOUR)
    assert other.acquire("m").seconds_left == 30
    held = other.acquire("m")
    assert (held.state, held.seconds_left <= 30) == (LeaseState.IN_FLIGHT, True)
    left = lease.seconds_left
    assert left > 20
    assert held.seconds_left > left - 1, "nobody is let in while the owner believes that it has it"
    owner.renew(lease)
    owner.complete(lease)
