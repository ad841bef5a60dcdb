"""The renewer extends leases while their handlers run, in Postgres, through an unreliable network if need be."""

import multiprocessing
import threading
from contextlib import ExitStack
from typing import Any

import pytest
from sqlalchemy import Engine

from support.postgres.statements import statements_sent
from support.postgres.tcp_proxy import TcpProxy
from support.txbox.leases import Store, acquired, postgres_store
from support.waiting import wait_until
from txbox import LeaseLost, LedgerError
from txbox.leases import Lease, LeaseState, PostgresLedger, idempotent, renewer
from txbox.leases.lease import elapsed
from txbox.leases.renewer import LeaseRenewer

LONG = 600.0
LEASE = 1.5
THREAD = "txbox-leases"

SECONDS_HELD = (
    "SELECT extract(epoch FROM clock_timestamp() - acquired_at)::float, expires_at > clock_timestamp() "
    "FROM message_lease WHERE message_id = %s"
)
EXPIRES_AT = "SELECT expires_at FROM message_lease WHERE message_id = %s"
ENDS_IN = (
    "SELECT extract(epoch FROM expires_at - clock_timestamp())::float FROM message_lease WHERE expires_at IS NOT NULL"
)


@pytest.fixture
def store(engine: Engine, schema_url: str) -> Store:
    return postgres_store(engine, schema_url)


@pytest.fixture
def ledger(engine: Engine) -> PostgresLedger:
    return PostgresLedger("mailing", engine=engine)


def moment_of_end(engine: Engine, message_id: str) -> Any:
    with engine.connect() as connection:
        return connection.exec_driver_sql(EXPIRES_AT, (message_id,)).scalar_one()


def wait_until_renewed(engine: Engine, message_id: str, times: int = 1) -> None:
    for _ in range(times):
        before = moment_of_end(engine, message_id)
        wait_until(lambda before=before: moment_of_end(engine, message_id) > before, f"{message_id} is renewed")


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


def test_no_error_of_a_renewal_or_of_starting_one_ends_the_renewing(
    ledger: PostgresLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    renew, start = ledger.renew, threading.Thread.start

    def broken_renewal(lease: Lease, *, lease_seconds: float) -> None:
        tried.append("renewal")
        if tried.count("renewal") == 1:
            raise SystemExit(1)
        renew(lease, lease_seconds=lease_seconds)

    def broken_start(thread: threading.Thread) -> None:
        if thread.name == "txbox-lease" and "start" not in tried:
            tried.append("start")
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(ledger, "renew", broken_renewal)
    monkeypatch.setattr(threading.Thread, "start", broken_start)
    lease = acquired(ledger, "m", lease_seconds=3)
    with LeaseRenewer(ledger).renewing(lease):
        wait_until(lambda: tried.count("renewal") >= 3, "it goes on", timeout=30)
    assert tried[0] == "start"


def test_a_lease_for_which_no_thread_can_be_started_is_not_renewals_for_ever(
    ledger: PostgresLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_threads(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(renewer, "_schedule", renewer._Schedule())
    lease = acquired(ledger, "m", lease_seconds=LEASE)
    renewing = LeaseRenewer(ledger).renewing(lease)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_threads)
        with pytest.raises(RuntimeError):
            renewing.__enter__()
    assert not renewer._schedule._renewals


def test_the_thread_is_woken_only_for_a_lease_that_is_due_before_it_looks_again(
    ledger: PostgresLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = renewer._Schedule()
    monkeypatch.setattr(renewer, "_schedule", schedule)
    monkeypatch.setattr(renewer, "IDLE_SECONDS", 0)
    woken: list[None] = []
    notify = schedule._changed.notify
    monkeypatch.setattr(schedule._changed, "notify", lambda: (woken.append(None), notify()))
    first, other = (acquired(ledger, name, lease_seconds=LONG) for name in ("first", "other"))
    with LeaseRenewer(ledger).renewing(first):
        wait_until(lambda: schedule._wakes_at > 0, "the thread waits")
        with LeaseRenewer(ledger).renewing(other):
            assert not woken
        with LeaseRenewer(ledger).renewing(acquired(ledger, "short", lease_seconds=LEASE)):
            assert len(woken) == 1
    with schedule._changed:
        notify()  # otherwise the thread stays as long as the longest lease would have


def test_a_handler_slower_than_its_lease_runs_once_and_keeps_others_out(engine: Engine, ledger: PostgresLedger) -> None:
    runs: list[str] = []

    def two_leases_later() -> bool:
        assert PostgresLedger("mailing", engine=engine).acquire("m").state is LeaseState.IN_FLIGHT
        with engine.connect() as connection:
            held, is_live = connection.exec_driver_sql(SECONDS_HELD, ("m",)).one()
        assert is_live
        return bool(held > 2 * LEASE)

    @idempotent(ledger=ledger, identify=lambda message_id: message_id, lease_seconds=LEASE)
    def handler(message_id: str, lease: Lease) -> str:
        runs.append(message_id)
        wait_until(two_leases_later, "two leases long", every=0.1)
        lease.ensure()
        return "done"

    assert handler("m") == "done"  # type: ignore[call-arg]  # its lease is handed in
    assert handler("m") == "done"  # type: ignore[call-arg]
    assert runs == ["m"]


def test_a_renewal_that_fails_for_a_while_is_tried_again(engine: Engine, proxied: Engine, proxy: TcpProxy) -> None:
    failures: list[tuple[str, Exception]] = []
    ledger = PostgresLedger("mailing", engine=proxied)
    lease = acquired(ledger, "m", lease_seconds=3.0)
    before = moment_of_end(engine, "m")
    proxy.refuse()
    proxy.cut()
    with LeaseRenewer(ledger, lambda lease, error: failures.append((lease.message_id, error))).renewing(lease):
        wait_until(lambda: len(failures) >= 2, "two renewals have failed")
        assert moment_of_end(engine, "m") == before
        proxy.accept()
        wait_until_renewed(engine, "m")
        wait_until(lambda: lease.seconds_left > 2.0)
    for message_id, error in failures:
        assert message_id == "m"
        assert isinstance(error, LedgerError)
        assert not error.permanent


def test_a_lease_that_is_lost_is_told_of_once_and_renewed_no_more(
    engine: Engine, store: Store, ledger: PostgresLedger, caplog: pytest.LogCaptureFixture
) -> None:
    failures: list[tuple[str, Exception]] = []
    lost, other = acquired(ledger, "lost", lease_seconds=LEASE), acquired(ledger, "other", lease_seconds=LEASE)
    store.expire("lost")
    acquired(ledger, "lost", lease_seconds=LONG)
    theirs = moment_of_end(engine, "lost")
    renewer_of_both = LeaseRenewer(ledger, lambda lease, error: failures.append((lease.message_id, error)))
    with renewer_of_both.renewing(lost), renewer_of_both.renewing(other):
        wait_until(lambda: failures, "it is told")
        assert lost.lost
        # The other one is renewed on and on, and this one is not even tried.
        wait_until_renewed(engine, "other", times=3)
    assert [(message_id, type(error)) for message_id, error in failures] == [("lost", LeaseLost)]
    assert "could not be renewed" in caplog.text
    assert moment_of_end(engine, "lost") == theirs


def test_no_renewal_outlasts_the_end_of_whoever_works_on_it(engine: Engine, ledger: PostgresLedger) -> None:
    lease = acquired(ledger, "m", lease_seconds=LEASE)
    until = elapsed() + 2.5 * LEASE
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection, ExitStack() as stack:
        stack.enter_context(LeaseRenewer(ledger).renewing(lease, until=until))

        def ends_in_time() -> bool:
            # Looked at before the database does: so what it says is rather too little than too much.
            now = elapsed()
            seconds = connection.exec_driver_sql(ENDS_IN).scalar_one()
            assert seconds <= until - now + 0.4, "it would last longer than its owner"
            return now > until - LEASE / 3

        wait_until(ends_in_time, every=0.01)
        # Renewed without a bound, it would last for another two thirds of a lease, at least.
        assert until - 0.1 < elapsed() + lease.seconds_left < until + 0.3
    wait_until(lambda: ledger.acquire("m").state is LeaseState.ACQUIRED, "it runs out")


def test_an_end_that_is_nearer_than_the_lease_renews_nothing(engine: Engine, ledger: PostgresLedger) -> None:
    lease, other = acquired(ledger, "m", lease_seconds=LEASE), acquired(ledger, "other", lease_seconds=LEASE)
    before = moment_of_end(engine, "m")
    renewer_of_both = LeaseRenewer(ledger)
    with renewer_of_both.renewing(lease, until=elapsed() + LEASE / 2), renewer_of_both.renewing(other):
        wait_until_renewed(engine, "other")
        assert moment_of_end(engine, "m") == before


def test_the_thread_goes_when_it_is_idle_and_comes_back(
    ledger: PostgresLedger, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = threads()  # those of other tests, not idle for long enough yet

    def ours() -> int:
        return len([thread for thread in threads() if thread not in others])

    monkeypatch.setattr(renewer, "_schedule", renewer._Schedule())
    monkeypatch.setattr(renewer, "IDLE_SECONDS", 0.2)
    one = LeaseRenewer(ledger)
    for number in range(2):
        lease = acquired(ledger, f"m-{number}", lease_seconds=LEASE)
        with one.renewing(lease):
            assert ours() == 1
            wait_until_renewed(engine, lease.message_id)
        wait_until(lambda: not ours(), "it has gone")


def test_one_thread_keeps_many_leases(engine: Engine, ledger: PostgresLedger) -> None:
    leases = [acquired(ledger, f"m-{number}", lease_seconds=3.0) for number in range(50)]
    one = LeaseRenewer(ledger)
    first = {lease.message_id: moment_of_end(engine, lease.message_id) for lease in leases}
    with ExitStack() as stack:
        for lease in leases:
            stack.enter_context(one.renewing(lease))
        assert len(threads()) == 1
        for lease in leases:
            wait_until(lambda lease=lease: moment_of_end(engine, lease.message_id) > first[lease.message_id])
            assert not lease.lost
    for lease in leases:
        ledger.complete(lease)


def test_what_has_ended_is_renewed_no_more(engine: Engine, ledger: PostgresLedger) -> None:
    one = LeaseRenewer(ledger)
    ended, going_on = acquired(ledger, "ended", lease_seconds=LEASE), acquired(ledger, "going on", lease_seconds=LEASE)
    with pytest.raises(ZeroDivisionError), one.renewing(ended):
        raise ZeroDivisionError
    with one.renewing(going_on), statements_sent(engine) as sent:
        wait_until_renewed(engine, "going on")
    assert sum("SET expires_at" in statement for statement in sent) <= 2
    assert moment_of_end(engine, "ended") < moment_of_end(engine, "going on")


def test_the_reader_of_failures_may_fail_and_every_other_lease_is_kept(
    store: Store, engine: Engine, ledger: PostgresLedger
) -> None:
    def broken(lease: Lease, error: Exception) -> None:
        told.set()
        raise ZeroDivisionError

    told = threading.Event()
    lost, other = acquired(ledger, "lost", lease_seconds=LEASE), acquired(ledger, "other", lease_seconds=LEASE)
    store.expire("lost")
    acquired(ledger, "lost", lease_seconds=LONG)
    one = LeaseRenewer(ledger, broken)
    with one.renewing(lost), one.renewing(other):
        assert told.wait(60)
        wait_until_renewed(engine, "other", times=2)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_has_a_thread_of_its_own_and_does_not_keep_its_parents_leases(
    engine: Engine, schema_url: str, ledger: PostgresLedger
) -> None:
    parents = acquired(ledger, "parent's", lease_seconds=LONG)
    one = LeaseRenewer(ledger)

    def child(pipe: "multiprocessing.connection.Connection") -> None:
        engine.dispose(close=False)
        lease = acquired(ledger, "child's", lease_seconds=LEASE)
        with one.renewing(lease):
            wait_until_renewed(engine, "child's")
            pipe.send([renewal.lease.message_id for renewal in renewer._schedule._renewals])
            pipe.recv()

    with one.renewing(parents):
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(target=child, args=(theirs,))
        process.start()
        try:
            assert ours.poll(20), "the fork keeps its lease"
            assert ours.recv() == ["child's"]
            ours.send("end")
        finally:
            process.join(20)
            process.kill()
    assert process.exitcode == 0


def test_a_renewal_that_hangs_keeps_no_other_lease_from_being_renewed(engine: Engine) -> None:
    hangs, go_on = threading.Event(), threading.Event()

    class Hanging(PostgresLedger):
        def renew(self, lease: Lease, *, lease_seconds: float | None = None) -> None:
            if lease.message_id == "hangs":
                hangs.set()
                assert go_on.wait(30)
            super().renew(lease, lease_seconds=lease_seconds)

    ledger = Hanging("mailing", engine=engine)
    one = LeaseRenewer(ledger)
    with one.renewing(acquired(ledger, "hangs", lease_seconds=LEASE)):
        assert hangs.wait(60)
        other = acquired(ledger, "other", lease_seconds=LEASE)
        with one.renewing(other):
            wait_until_renewed(engine, "other", times=3)
            assert other.seconds_left
        go_on.set()
    wait_until(lambda: not [one for one in threading.enumerate() if one.name == "txbox-lease"], "it has come back")


def test_a_lease_that_was_long_in_coming_is_renewed_the_sooner(engine: Engine, ledger: PostgresLedger) -> None:
    answered = acquired(ledger, "m", lease_seconds=LONG)
    late = Lease(
        "mailing",
        "m",
        fence=answered.fence,
        attempt=1,
        unknown_attempts=0,
        lease_seconds=LONG,
        asked_at=elapsed() - LONG * 0.9,
    )
    before = moment_of_end(engine, "m")  # read first: the renewal is due at once, and the next one in minutes
    with LeaseRenewer(ledger).renewing(late):
        wait_until(lambda: moment_of_end(engine, "m") > before)
