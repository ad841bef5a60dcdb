"""A maintainer of a rotating inbox: when it opens a generation, and when one goes."""

from datetime import timedelta

import pytest
from sqlalchemy import Engine, create_engine, event

from integration.txbox.maintenance.conftest import StartMaintainer, found, left, record
from support.postgres.statements import run
from txbox import Inbox, InvalidConfiguration
from txbox.maintenance import PlannedTask, Retention
from txbox.maintenance.rotation import Generations, InboxConversion
from txbox.maintenance.rotation.generations import GenerationStatements
from txbox.status import read_status

WINDOW = timedelta(days=30)
BILLING = Retention(inbox={"billing": WINDOW})


@pytest.fixture
def generations(engine: Engine) -> Generations:
    InboxConversion(engine).forward()
    return Generations(engine)


def age(engine: Engine, days: int) -> None:
    """Let time pass."""
    earlier = "{} - make_interval(days => {})"
    opened, closed, processed = (earlier.format(name, days) for name in ("opened_at", "closed_at", "processed_at"))
    run(engine, f"UPDATE inbox_generation SET opened_at = {opened}, closed_at = {closed}")
    run(engine, f"UPDATE processed_message SET processed_at = {processed}")


def prevented(engine: Engine) -> str | None:
    """Return what the status says."""
    runway = read_status(engine).runway
    assert runway is not None
    return {one.task: one.error for one in runway.tasks}["rotation"]


def test_generations_are_opened_and_dropped_as_the_window_moves(
    engine: Engine, generations: Generations, make_maintainer: StartMaintainer
) -> None:
    most = 0
    for step in range(12):
        record(engine, "billing", f"s{chr(97 + step)}-", 100, days_ago=0)
        make_maintainer(BILLING).run_once()
        most = max(most, len(generations.list()))
        age(engine, 10)
    kept = set(left(engine))
    assert {f"s{chr(97 + step)}-" for step in (9, 10, 11)} <= kept, "of the last thirty days, all"
    assert len(kept) <= 5
    assert 4 <= most <= 5
    assert found(engine, "SELECT removed >= 0 FROM maintenance WHERE task = 'rotation'")
    with engine.begin() as connection:
        assert not Inbox("billing").record(connection, "sk-7")


def test_a_dry_run_says_how_many_rows_would_go_with_their_generation(
    engine: Engine, generations: Generations, make_maintainer: StartMaintainer
) -> None:
    record(engine, "billing", "old-", 100, days_ago=0)
    make_maintainer(BILLING).run_once()
    age(engine, 10)
    make_maintainer(BILLING).run_once()
    run(engine, "ANALYZE processed_message")

    def planned() -> list[PlannedTask]:
        return [one for one in make_maintainer(BILLING).plan() if one.task in ("inbox", "rotation")]

    age(engine, 29)
    assert planned() == [PlannedTask("rotation", 0, exact=False)], "the generation was closed 29 days ago"
    age(engine, 2)
    assert planned() == [PlannedTask("rotation", 100, exact=False)]
    record(engine, "forever", "new-", 1, days_ago=0)
    assert planned() == [PlannedTask("rotation", 0, exact=False)], "while a subscriber has no window, none goes"
    assert len(generations.list()) == 2


def test_no_generation_is_opened_while_a_subscriber_has_no_window(
    engine: Engine, generations: Generations, make_maintainer: StartMaintainer, caplog: pytest.LogCaptureFixture
) -> None:
    for subscriber in ("billing", "forever"):
        record(engine, subscriber, f"{subscriber}-", 10, days_ago=0)
    age(engine, 400)
    for retention in (BILLING, Retention()):
        caplog.clear()
        make_maintainer(retention).run_once()
        assert len(generations.list()) == 1
        first = "forever" if retention.inbox else "billing"
        assert f"{first} first" in caplog.text
        assert f"{first} first: no generation can go" in (prevented(engine) or "")
    make_maintainer(Retention(inbox={"*": WINDOW})).run_once()
    assert len(generations.list()) == 2
    assert prevented(engine) is None


def test_the_status_says_what_keeps_a_generation_that_is_due_from_being_opened(
    engine: Engine, generations: Generations, make_maintainer: StartMaintainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txbox.maintenance.maintainer.SETTLE_SECONDS", 0.1)
    record(engine, "billing", "m-", 10, days_ago=0)
    with engine.begin() as connection:
        connection.exec_driver_sql("LOCK processed_message IN ROW EXCLUSIVE MODE")
        run(engine, "UPDATE inbox_generation SET opened_at = opened_at - interval '20 days'")
        make_maintainer(BILLING).run_once()
        assert "transactions that use the inbox do not end" in (prevented(engine) or "")
    while len(generations.list()) < 4:
        assert generations.rotate()
    age(engine, 31)
    make_maintainer(BILLING, generations=2).run_once()
    assert "there are 4, and more would slow recording down" in (prevented(engine) or "")
    make_maintainer(BILLING).run_once()
    assert prevented(engine) is None


def test_nothing_goes_before_every_transaction_can_see_the_horizons(
    engine: Engine, generations: Generations, make_maintainer: StartMaintainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(engine, "billing", "old-", 10, days_ago=0)
    assert generations.rotate()
    age(engine, 40)
    record(engine, "billing", "young-", 10, days_ago=0)
    with monkeypatch.context() as patch, engine.connect() as other:
        patch.setattr("txbox.maintenance.maintainer.SETTLE_SECONDS", 0.1)
        pid = other.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
        make_maintainer(BILLING).run_once()
        assert left(engine) == {"old-": 10, "young-": 10}
        runway = read_status(engine).runway
        assert runway is not None
        assert runway.waits_for == (pid,)
    runway = read_status(engine).runway
    assert runway is not None
    assert runway.waits_for == (), "it has ended"
    make_maintainer(BILLING).run_once()
    assert left(engine) == {"young-": 10}


def test_one_that_was_overtaken_forgets_nothing_by_a_horizon_that_it_has_not_waited_for(
    schema_url: str, engine: Engine, generations: Generations, make_maintainer: StartMaintainer
) -> None:
    """It stands still for so long that another one takes over and moves the horizon."""
    record(engine, "billing", "old-", 10, days_ago=0)
    assert generations.rotate()
    age(engine, 10)
    own = create_engine(schema_url)

    @event.listens_for(own, "before_cursor_execute")
    def move(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if statement == GenerationStatements.load().forgettable:
            run(engine, "UPDATE inbox_horizon SET horizon = now()")

    make_maintainer(BILLING, engine=own).run_once()
    own.dispose()
    assert found(engine, "SELECT now() - horizon < interval '1 minute' FROM inbox_horizon")
    assert left(engine) == {"old-": 10}
    assert generations.forget(settled=generations.settle(seconds=60)) == (1,)


def test_a_generation_of_the_same_number_that_is_another_one_by_now_stays(
    schema_url: str, engine: Engine, generations: Generations
) -> None:
    """Who forgets stands still after it has read which generation may go."""
    record(engine, "billing", "old-", 10, days_ago=0)
    assert generations.rotate()
    run(engine, "INSERT INTO inbox_horizon (subscriber_id, horizon) VALUES ('billing', now() + interval '2 hours')")
    own = create_engine(schema_url)

    @event.listens_for(own, "before_cursor_execute")
    def turn_back_and_on_again(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if statement == GenerationStatements.load().move_parked and "young-" not in left(engine):
            InboxConversion(engine).back()
            InboxConversion(engine).forward()
            record(engine, "billing", "young-", 10, days_ago=0)
            assert generations.rotate()

    assert Generations(own).forget(settled=generations.settle(seconds=60)) == ()
    own.dispose()
    assert left(engine) == {"old-": 10, "young-": 10}


def test_there_are_as_many_generations_as_are_asked_for_at_most(make_maintainer: StartMaintainer) -> None:
    with pytest.raises(InvalidConfiguration, match="generations must be from 2 to 12, not 13"):
        make_maintainer(BILLING, generations=13)
