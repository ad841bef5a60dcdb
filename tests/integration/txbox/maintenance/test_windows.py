"""Windows that are too short, and windows of subscribers that there are not."""

from datetime import timedelta

import pytest
from sqlalchemy import Engine

from integration.txbox.maintenance.conftest import KEPT, StartMaintainer, left, record
from support.postgres.statements import run
from txbox import InvalidConfiguration
from txbox.maintenance import Retention

DAY = timedelta(days=1)


def report_retention(engine: Engine, subscriber_id: str, days: float) -> None:
    run(
        engine,
        "INSERT INTO worker_report (worker_id, subscriber_id, source, source_retention_seconds, host, pid, version, "
        "state) VALUES (gen_random_uuid(), %s, 'queue', %s, 'h', 1, '1', 'working')",
        (subscriber_id, days * 86_400),
    )


def test_a_window_shorter_than_a_queue_may_keep_its_messages_is_refused(
    engine: Engine, make_maintainer: StartMaintainer
) -> None:
    record(engine, "billing", "old-", 10, days_ago=31)
    for retention in (Retention(inbox={"billing": 10 * DAY}), Retention(inbox={"*": 10 * DAY}), Retention(leases=DAY)):
        for attempt in (make_maintainer(retention).plan, make_maintainer(retention).run_once):
            with pytest.raises(InvalidConfiguration, match=r"14 days.*--force"):
                attempt()
    assert left(engine) == {"old-": 10}


def test_a_window_is_measured_by_what_a_worker_has_reported(engine: Engine, make_maintainer: StartMaintainer) -> None:
    record(engine, "billing", "old-", 10, days_ago=31)
    report_retention(engine, "billing", 4)
    report_retention(engine, "billing", 2)
    with pytest.raises(InvalidConfiguration, match="4 days"):
        make_maintainer(Retention(inbox={"billing": 3 * DAY})).run_once()
    make_maintainer(Retention(inbox={"billing": 5 * DAY})).run_once()
    assert left(engine) == {}


def test_a_window_for_a_subscriber_that_there_is_not_is_named(
    engine: Engine, make_maintainer: StartMaintainer, caplog: pytest.LogCaptureFixture
) -> None:
    record(engine, "billing", "old-", 10, days_ago=31)
    make_maintainer(Retention(inbox={"billing": KEPT, "*": KEPT})).plan()
    assert "spelled" not in caplog.text
    make_maintainer(Retention(inbox={"biling": KEPT})).plan()
    assert "a window for biling" in caplog.text


def test_a_window_that_is_forced_warns_at_each_start(
    engine: Engine, make_maintainer: StartMaintainer, caplog: pytest.LogCaptureFixture
) -> None:
    record(engine, "billing", "old-", 10, days_ago=31)
    maintainer = make_maintainer(Retention(inbox={"billing": DAY}), force=True)
    maintainer.run_once()
    maintainer.run_once()
    assert caplog.text.count("it is forced") == 2
    assert left(engine) == {}


def test_a_queue_that_turns_out_to_keep_messages_longer_stops_its_subscriber_only(
    engine: Engine, make_maintainer: StartMaintainer, caplog: pytest.LogCaptureFixture
) -> None:
    for subscriber in ("a", "b"):
        record(engine, subscriber, f"{subscriber}-", 10, days_ago=31)
    maintainer = make_maintainer(Retention(inbox={"*": 20 * DAY}))
    report_retention(engine, "a", 60)
    maintainer._round(60, once=True)  # as a service that was started before the report
    assert left(engine) == {"a-": 10}
    assert "nothing of a is forgotten" in caplog.text
