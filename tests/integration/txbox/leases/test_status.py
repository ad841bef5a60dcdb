"""How leases stand, read from a real database."""

import math

import pytest
from sqlalchemy import Engine

from support.postgres.statements import run
from support.txbox.leases import acquired
from txbox import SchemaMissing
from txbox.leases import PostgresLedger
from txbox.leases.status import LeaseStatus, LedgerStatus, read_lease_status
from txbox.status import read_status, status


def test_nothing_was_ever_leased(engine: Engine) -> None:
    assert read_lease_status(engine, exact_up_to_rows=math.inf) == LeaseStatus()


def test_each_subscriber_has_its_leases_counted_by_what_became_of_them(engine: Engine) -> None:
    mailing, gifts = PostgresLedger("mailing", engine=engine), PostgresLedger("gifts", engine=engine)
    for name in "abc":
        mailing.complete(acquired(mailing, name))
    for name in "de":
        mailing.release(acquired(mailing, name))
    acquired(mailing, "f", lease_seconds=600)
    acquired(gifts, "g", lease_seconds=600)
    run(
        engine,
        "UPDATE message_lease SET expires_at = now() - interval '1 hour', acquired_at = now() - interval '2 hours' "
        "WHERE message_id = 'g'",
    )
    found = read_status(engine).leases
    assert (found.rows, found.exact) == (7, True)
    ours, theirs = found.ledgers[1], found.ledgers[0]
    assert ours.longest_seconds is not None
    assert 0 <= ours.longest_seconds < 60
    assert ours == LedgerStatus("mailing", 3, 1, 0, 2, ours.longest_seconds)
    assert (theirs.subscriber_id, theirs.in_flight, theirs.run_out) == ("gifts", 0, 1)
    assert theirs.longest_seconds == pytest.approx(7_200, abs=60)


def test_a_large_table_is_estimated_unless_asked_otherwise(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = PostgresLedger("mailing", engine=engine)
    for number in range(20):
        ledger.complete(acquired(ledger, str(number)))
    run(engine, "ANALYZE message_lease")
    monkeypatch.setattr(status, "EXACT_UP_TO_ROWS", 10)
    found = read_status(engine).leases
    assert found == LeaseStatus(found.rows, exact=False)
    assert found.rows in (20, 40), "a session reports its rows within a second: after the ANALYZE they count twice"
    assert read_status(engine, exact=True).leases.ledgers == (LedgerStatus("mailing", 20),)


def test_without_the_table_it_says_so(engine: Engine) -> None:
    run(engine, "DROP TABLE message_lease")
    with pytest.raises(SchemaMissing, match="message_lease"):
        read_status(engine)
