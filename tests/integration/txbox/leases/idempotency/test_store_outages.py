"""Outages of the store while an idempotent handler runs."""

import threading

import pytest

from support.postgres.tcp_proxy import TcpProxy
from support.txbox.idempotent_handlers import MESSAGE, result_of
from support.waiting import wait_until
from txbox import LedgerError, Message
from txbox.leases import Lease, LeaseState, PostgresLedger, idempotent


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_store_that_is_away_at_the_release_does_not_hide_the_handlers_error(
    ledger: PostgresLedger, remote: PostgresLedger, proxy: TcpProxy, is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def handler(message: Message) -> None:
        proxy.refuse()
        proxy.cut()
        raise ZeroDivisionError

    async def handler_async(message: Message) -> None:
        handler(message)

    with pytest.raises(ZeroDivisionError):
        result_of(idempotent(handler_async if is_async else handler, ledger=remote)(MESSAGE))
    assert "could not be released" in caplog.text
    assert ledger.acquire("m").state is LeaseState.IN_FLIGHT, "until its lease has run out"


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_store_that_is_away_for_a_while_when_the_work_is_done_hears_of_it_later(
    ledger: PostgresLedger, remote: PostgresLedger, proxy: TcpProxy, is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    runs: list[int] = []

    def handler(message: Message) -> str:
        runs.append(1)
        proxy.refuse()
        proxy.cut()
        back = threading.Thread(target=come_back)
        back.start()
        return "sent"

    def come_back() -> None:
        wait_until(lambda: caplog.text.count("will be tried again") >= 2, "it was tried again")
        proxy.accept()

    async def handler_async(message: Message) -> str:
        return handler(message)

    decorated = idempotent(handler_async if is_async else handler, ledger=remote)
    assert result_of(decorated(MESSAGE)) == "sent"
    assert ledger.acquire("m").state is LeaseState.COMPLETED
    assert result_of(decorated(MESSAGE)) == "sent"
    assert runs == [1]


def test_a_store_that_stays_away_for_longer_than_the_lease_is_an_error(
    remote: PostgresLedger, proxy: TcpProxy, ledger: PostgresLedger
) -> None:
    def handler(message: Message, lease: Lease) -> None:
        unknown.append(lease.unknown_attempts)
        proxy.refuse()
        proxy.cut()

    unknown: list[int] = []
    with pytest.raises(LedgerError) as caught:
        idempotent(handler, ledger=remote, lease_seconds=1.0)(MESSAGE)
    assert not caught.value.permanent
    # The next one is told that the work may have been done.
    lease = wait_until(lambda: ledger.acquire("m").lease, "it has run out")
    assert lease is not None
    assert [*unknown, lease.unknown_attempts] == [0, 1]
