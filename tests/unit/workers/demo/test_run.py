"""The report of a run: what the demo says of itself."""

import pytest

from txbox_workers.demo.accounting import Comparison, Deliveries
from txbox_workers.demo.crew import Kills
from txbox_workers.demo.publisher import Sent
from txbox_workers.demo.run import Plan, Report

RIGHT = Comparison(customers=1, wrong=(), expected_cents=1177, found_cents=1177, difference_cents=0)
WRONG = Comparison(customers=1, wrong=("00001",), expected_cents=1177, found_cents=1178, difference_cents=1)
COMPLETE = Deliveries(received=2, processed=1, duplicates=1, failed=0, in_flight=0, contradictions=())
ONE_MISSING = Deliveries(received=2, processed=1, duplicates=0, failed=0, in_flight=0, contradictions=())


@pytest.mark.parametrize(
    ("comparison", "deliveries", "exact"),
    [(RIGHT, COMPLETE, True), (RIGHT, ONE_MISSING, False), (WRONG, COMPLETE, False), (WRONG, ONE_MISSING, False)],
)
def test_exact_takes_both_the_accounts_and_the_deliveries(
    comparison: Comparison, deliveries: Deliveries, exact: bool
) -> None:
    report = Report(
        plan=Plan(purchases=1, workers=2, kills=0, seed=1),
        sent=Sent(purchases=1, resent=1),
        deliveries=deliveries,
        kills=Kills(),
        workers_started=2,
        comparison=comparison,
        dead=0,
        seconds=1.0,
        schema="txbox_demo_0",
        queue_url="q",
    )
    assert report.exact is exact
    assert report.as_dict()["exact"] is exact
