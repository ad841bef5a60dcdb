"""What becomes of a delivery whose work under a lease has raised."""

from datetime import UTC, datetime

import pytest

from txbox import Expired, InFlight, LedgerError, Mismatch, Outcome, Reason
from txbox.leases import Lease
from txbox.leases.lease import AttemptEnd, elapsed
from txbox_workers.processing.deadlocks import Stopping
from txbox_workers.processing.handler_transactions import Parked
from txbox_workers.processing.ledger_processor import Decision, decide
from txbox_workers.processing.outage_errors import DatabaseUnavailable

OLD = datetime(2026, 1, 1, tzinfo=UTC)
NOT_MADE, NOT_COUNTED, FAILED, UNKNOWN = (
    AttemptEnd.NOT_MADE,
    AttemptEnd.NOT_COUNTED,
    AttemptEnd.FAILED,
    AttemptEnd.UNKNOWN,
)


def leased(*, attempt: int) -> Lease:
    return Lease("a", "1", fence=1, attempt=attempt, unknown_attempts=0, lease_seconds=60, asked_at=elapsed())


@pytest.mark.parametrize(
    ("error", "before_work", "after_it_began"),
    [
        (KeyboardInterrupt(), Decision(NOT_MADE), Decision(UNKNOWN)),
        (DatabaseUnavailable(""), Decision(NOT_MADE), Decision(NOT_COUNTED)),
        (Stopping(), Decision(NOT_MADE, Outcome.IN_FLIGHT), Decision(NOT_COUNTED, Outcome.IN_FLIGHT)),
        (InFlight("a", ["1"]), Decision(NOT_MADE, Outcome.IN_FLIGHT), Decision(NOT_MADE, Outcome.IN_FLIGHT)),
        (LedgerError(""), Decision(NOT_MADE, Outcome.IN_FLIGHT), Decision(NOT_MADE, Outcome.IN_FLIGHT)),
        (Parked(), Decision(FAILED, Outcome.DEAD), Decision(FAILED, Outcome.DEAD)),
        (Mismatch("a", ["1"]), Decision(NOT_MADE, Reason.MISMATCH), Decision(FAILED, Outcome.FAILED)),
        (Expired("a", {"1": OLD}, OLD), Decision(NOT_MADE, Reason.EXPIRED), Decision(FAILED, Outcome.FAILED)),
        (ValueError(), Decision(FAILED, Outcome.FAILED), Decision(FAILED, Outcome.FAILED)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_is_decided_by_whether_the_work_had_begun(
    error: BaseException, before_work: Decision, after_it_began: Decision
) -> None:
    lease = leased(attempt=1)
    decided = [decide(lease, error, malformed=False, parks=True, max_attempts=3)]
    lease.begin_work()
    decided.append(decide(lease, error, malformed=False, parks=True, max_attempts=3))
    assert repr(decided) == repr([before_work, after_it_began])  # an outcome is as equal to a reason as their texts


def test_the_last_attempt_and_what_cannot_be_read_are_parked() -> None:
    lease = leased(attempt=3)
    assert decide(lease, ValueError(), malformed=False, parks=True, max_attempts=3).outcome is Reason.FAILED
    assert decide(lease, ValueError(), malformed=False, parks=True, max_attempts=4).outcome is Outcome.FAILED
    assert decide(lease, ValueError(), malformed=True, parks=True, max_attempts=4).outcome is Reason.MALFORMED
    lease.returned = True
    assert decide(lease, ValueError(), malformed=False, parks=True, max_attempts=3).ended is UNKNOWN
