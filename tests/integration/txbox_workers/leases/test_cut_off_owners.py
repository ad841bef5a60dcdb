"""Owners that lose their ledger in a handler and live on keep the message until it knows how that has ended."""

from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from support.postgres.tcp_proxy import TcpProxy
from support.txbox.events import Kept
from support.waiting import wait_until
from support.workers.business import Business, apply, once
from support.workers.ledger_worker import make
from support.workers.memory_worker import at_work, messages
from txbox import DeadLetters, Inbox, Message
from txbox.instrumentation import DatabaseLost
from txbox.leases import Lease, PostgresLedger
from txbox_workers.memory_source import MemorySource

OVER = "SELECT count(*) FROM message_lease WHERE expires_at < clock_timestamp()"


def heal(proxy: TcpProxy, kept: Kept, source: MemorySource, business: Business) -> None:
    """Let the owner reach its ledger again, some time after its lease is over."""
    before = len(kept.of(DatabaseLost))
    wait_until(lambda: len(kept.of(DatabaseLost)) >= before + 3)
    wait_until(lambda: business.rows(OVER) == [1], "the lease is over")
    assert source.receive() == [], "no other owner may have it"
    proxy.accept()


def test_beside_an_inbox_an_owner_that_was_cut_off_has_made_no_attempt(
    proxy: TcpProxy, proxied: Engine, engine: Engine, business: Business
) -> None:
    seen: list[tuple[int, int]] = []
    kept = Kept()

    def handle(session: Session, message: Message, lease: Lease) -> None:
        apply(session, message)
        if len(seen) < 3:
            proxy.refuse()
            proxy.cut()
        seen.append((lease.attempt, lease.unknown_attempts))
        session.execute(text("SELECT 1"))

    source = MemorySource(messages("a"))
    ledger = PostgresLedger("mailing", engine=proxied)
    options = {"inbox": Inbox("mailing"), "max_attempts": 1, "lease_seconds": 0.3, "hooks": [kept]}
    with at_work(make(source, ledger, handle, proxied, **options)):
        for runs in (1, 2, 3):
            wait_until(lambda runs=runs: len(seen) == runs)
            heal(proxy, kept, source, business)
        assert source.wait_until_empty(20)
    assert seen == [(1, 0), (1, 1), (1, 2), (1, 3)]
    assert business.applied() == once("a")
    assert DeadLetters(engine).list() == []


def test_a_failure_that_the_ledger_could_not_be_told_of_is_told_later_and_is_known(
    proxy: TcpProxy, proxied: Engine, engine: Engine, business: Business
) -> None:
    seen: list[tuple[int, int]] = []
    kept = Kept()

    def handle(message: Message, lease: Lease) -> None:
        seen.append((lease.attempt, lease.unknown_attempts))
        if len(seen) == 1:
            proxy.refuse()
            proxy.cut()
            raise ValueError("no")

    source = MemorySource(messages("a"))
    ledger = PostgresLedger("mailing", engine=proxied)
    with at_work(make(source, ledger, handle, proxied, lease_seconds=0.3, hooks=[kept])):
        wait_until(lambda: len(seen) == 1)
        heal(proxy, kept, source, business)
        assert source.wait_until_empty(20)
    assert seen == [(1, 0), (2, 0)]
