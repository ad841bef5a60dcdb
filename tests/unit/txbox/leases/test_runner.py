"""The steps of work under a lease, one by one: what is asked for next, whatever came of the step before."""

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.exc import OperationalError, ProgrammingError

from txbox import EffectUnknown, InFlight, LeaseLost, LedgerError
from txbox.leases import Acquisition, Lease, LeaseState, PostgresLedger, runner
from txbox.leases.handlers import has_lease_parameter
from txbox.leases.lease import AttemptEnd, elapsed
from txbox.leases.runner import LeaseRunner, Release, _LedgerCall, _Pause, release_after

# Never asked: what the steps say is not carried out here.
LEDGER = PostgresLedger("mailing", engine=create_engine("postgresql+psycopg://127.0.0.1:1/none"))


def make_lease(ago: float = 0.0) -> Lease:
    return Lease("mailing", "m", fence=7, attempt=1, unknown_attempts=0, lease_seconds=30, asked_at=elapsed() - ago)


def begin(leased: LeaseRunner, *, until: float | None = None, on_error: Callable[..., Release] = release_after) -> Any:
    steps = leased._steps("m", None, until, on_error)
    assert isinstance(next(steps), _LedgerCall)
    return steps


def acquired(lease: Lease) -> Acquisition:
    return Acquisition(LeaseState.ACQUIRED, lease)


def test_what_is_in_flight_is_asked_for_again_after_pauses_that_never_outlast_the_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, pauses = 1000.0, 0
    monkeypatch.setattr(runner, "elapsed", lambda: now)
    steps = begin(LeaseRunner(LEDGER, wait_seconds=0.2))
    in_flight = Acquisition(LeaseState.IN_FLIGHT, seconds_left=1)
    while now < 1000.2 - 1e-6:
        step = steps.send(in_flight)
        assert isinstance(step, _Pause)
        assert 0 < step.seconds <= 1000.2 - now + 1e-6
        now += step.seconds
        pauses += 1
        assert isinstance(steps.send(None), _LedgerCall)
    assert pauses > 1
    now = 1000.3
    with pytest.raises(InFlight):
        steps.send(in_flight)


@pytest.mark.parametrize(
    ("error", "ended"),
    [
        (ValueError("no"), AttemptEnd.FAILED),
        (LeaseLost("mailing", "m", 7), AttemptEnd.FAILED),
        (EffectUnknown("no answer"), AttemptEnd.UNKNOWN),
        (KeyboardInterrupt(), AttemptEnd.UNKNOWN),
        (asyncio.CancelledError(), AttemptEnd.UNKNOWN),
        (SystemExit(), AttemptEnd.UNKNOWN),
        (OperationalError("SELECT 1", None, psycopg.OperationalError("gone")), AttemptEnd.NOT_COUNTED),
        (ProgrammingError("SELECT 1", None, psycopg.errors.UndefinedTable("no such table")), AttemptEnd.FAILED),
        (OperationalError("SELECT 1", None, psycopg.errors.TransactionTimeout("too long")), AttemptEnd.UNKNOWN),
    ],
)
def test_what_is_known_of_an_attempt_is_told_by_its_error(error: BaseException, ended: AttemptEnd) -> None:
    lease = make_lease()
    lease.begin_work()
    assert release_after(lease, error).ended is ended


def test_a_failure_says_nothing_of_what_the_work_did_when_it_began_under_this_lease_before() -> None:
    lease = make_lease()
    lease.begin_work()
    lease.begin_work()
    assert release_after(lease, ValueError("no")).ended is AttemptEnd.UNKNOWN


@pytest.mark.parametrize("error", [KeyboardInterrupt(), asyncio.CancelledError()])
def test_who_is_interrupted_before_its_work_has_made_no_attempt(error: BaseException) -> None:
    assert release_after(make_lease(), error).ended is AttemptEnd.NOT_MADE


def test_work_that_begins_again_under_its_lease_is_told_of_the_first_time() -> None:
    lease = make_lease()
    for before in range(3):
        lease.begin_work()
        assert lease.unknown_attempts == before


def test_how_an_attempt_has_ended_is_asked_with_the_error() -> None:
    asked: list[object] = []

    def fails(*arguments: object) -> Release:
        asked.extend(arguments)
        return Release(AttemptEnd.NOT_MADE)

    lease, error = make_lease(), ValueError("no")
    steps = begin(LeaseRunner(LEDGER), on_error=fails)
    steps.send(acquired(lease))
    steps.throw(error)
    assert asked == [lease, error]


@pytest.mark.parametrize(
    ("ago", "error"),
    [(0.0, LedgerError("no", permanent=True)), (31.0, LedgerError("away")), (0.0, LeaseLost("mailing", "m", 7))],
    ids=["a permanent error", "the lease has run out", "the lease was lost"],
)
def test_a_completion_is_not_tried_again(ago: float, error: Exception) -> None:
    steps = begin(LeaseRunner(LEDGER))
    steps.send(acquired(make_lease(ago)))
    assert isinstance(steps.send("done"), _LedgerCall)
    with pytest.raises(type(error)):
        steps.throw(error)


class Handlers:
    def method(self, message: object, lease: Lease) -> None: ...

    def __call__(self, message: object, *, lease: Lease) -> None: ...


def named(message: object, lease: Lease) -> None: ...


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        (named, True),
        (lambda message, *, lease=None: None, True),
        (Handlers().method, True),
        (Handlers(), True),
        (functools.partial(named, "m"), True),
        (lambda message: None, False),
        (lambda message, **options: None, False),
        (lambda message, **lease: None, False),
        (lambda message, *lease: None, False),
        (print, False),
        (dict, False),
        (max, False),
    ],
)
def test_a_handler_is_given_its_lease_if_it_names_it(handler: Callable[..., Any], expected: bool) -> None:
    assert has_lease_parameter(handler) is expected


def test_who_has_to_say_when_it_ends_keeps_time_for_that() -> None:
    steps = begin(LeaseRunner(LEDGER), until=elapsed() + 0.9)
    steps.send(acquired(make_lease()))
    assert isinstance(steps.send("done"), _LedgerCall)
    with pytest.raises(LedgerError, match="away"):
        steps.throw(LedgerError("away"))
