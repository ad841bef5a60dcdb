"""Faults of every kind, planted at random among thousands of messages: an audit names these, and no other."""

import random
from collections import Counter
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, make_url
from sqlalchemy.exc import DBAPIError

from support.postgres.statements import run
from support.txbox.audit_world import ELSEWHERE, HERE, HOUR, make_world, named
from txbox import InvalidConfiguration
from txbox.instrumentation import Audited, Event
from txbox.maintenance.rotation import Generations, InboxConversion
from txbox.operations.audit import FindingKind, audit, audit_inbox, auditor, sides
from txbox.operations.audit.report import time_of


@pytest.fixture
def small_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auditor, "STRETCH_ROWS", 300)
    monkeypatch.setattr(auditor, "SMALLEST_ROWS", 40)
    monkeypatch.setattr(sides, "LETTERS", 7)
    monkeypatch.setattr(auditor, "PAUSE_SHARE", 0.0)


@pytest.mark.usefixtures("small_stretches")
@pytest.mark.parametrize("time_ordered", [True, False], ids=["uuid7", "any ids"])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_planted_is_named_and_nothing_else(
    engine: Engine, other_engine: Engine, seed: int, time_ordered: bool
) -> None:
    chance = random.Random(f"{seed} {time_ordered}")
    states, faults = chance.randrange(1, 20), chance.choice([1, 3, 40])
    world = make_world(
        engine, other_engine, f"{seed} {time_ordered}", 2_500, time_ordered=time_ordered, states=states, faults=faults
    )
    world.write()
    events: list[Event] = []
    report = audit(engine, [HERE], other_engine, "billing", limit=1_000, hooks=[events.append])
    assert named(report) == world.faults
    assert Counter(report.counts) == world.counted()
    assert not report.balanced
    assert [type(event) for event in events] == [Audited]
    judged = ("processed", "parked", "expired", "discarded", "retrying", "in_flight", "missing", "overdue", "unparked")
    assert report.counts["sent"] == sum(report.counts[state] for state in judged)
    in_stretches = Counter[str]()
    for stretch in report.differing:
        in_stretches.update(stretch.faults)
        if time_ordered and stretch.after:
            assert stretch.since is not None
            assert stretch.until is not None
            assert stretch.since <= stretch.until
    assert in_stretches["missing"] == report.counts["missing"]
    assert in_stretches["foreign"] == report.counts["foreign"]
    assert report.stretches > len(world.sent) / 300


@pytest.mark.usefixtures("small_stretches")
def test_without_faults_it_is_balanced_and_no_id_travels(
    engine: Engine, other_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(engine, other_engine, 7, 1_000)
    world.write()
    with monkeypatch.context() as patch:
        patch.setattr(auditor._Audit, "_open", None)
        report = audit(engine, [HERE], other_engine, "billing")
    assert report.balanced
    assert not report.findings
    assert +Counter(report.counts) == world.counts
    with_other_destination = audit(engine, [HERE, ELSEWHERE], engine, "nobody", in_flight=1_000 * HOUR, limit=0)
    assert with_other_destination.counts["in_flight"] == 1_002


def test_more_than_the_limit_is_counted(engine: Engine, other_engine: Engine) -> None:
    world = make_world(engine, other_engine, 8, 10, time_ordered=False, faults=20)
    world.write()
    report = audit(engine, [HERE], other_engine, "billing", limit=7)
    assert (report.counts["missing"], report.counts["foreign"]) == (40, 20)
    assert len(report.findings) == 7
    assert named(report) < world.faults


@pytest.mark.usefixtures("small_stretches")
def test_servers_that_hash_differently_are_compared_as_well(
    engine: Engine, other_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(engine, other_engine, 21, 1_000, time_ordered=False, states=3, faults=3)
    world.write()
    real = sides._Side._read

    def read(self: Any, what: str, stretch: Any, **more: Any) -> Any:
        if "seed" in more and isinstance(self, sides.RecordedSide):
            more["seed"] += 1
        return real(self, what, stretch, **more)

    monkeypatch.setattr(sides._Side, "_read", read)
    report = audit(engine, [HERE], other_engine, "billing", limit=1_000)
    assert named(report) == world.faults
    assert Counter(report.counts) == world.counted()


def test_a_message_that_was_redriven_after_the_outbox_has_forgotten_it_is_not_foreign(
    engine: Engine, other_engine: Engine
) -> None:
    world = make_world(engine, other_engine, 22, 10, time_ordered=False)
    message_id = world.new_id(world.now)
    world.park(message_id, redriven_at=world.now - 11 * HOUR)
    world.letters[-1] = (*world.letters[-1][:4], world.now - 300 * HOUR, *world.letters[-1][5:])
    world.record(message_id, world.now - 10 * HOUR)
    foreign = world.new_id(world.now)
    world.record(foreign, world.now - 10 * HOUR)
    world.write()
    report = audit(engine, [HERE], other_engine, "billing")
    assert named(report) == {("foreign", foreign)}
    assert report.counts["not_kept"] == 1


@pytest.mark.usefixtures("small_stretches")
def test_beside_other_producers_nothing_is_foreign(engine: Engine, other_engine: Engine) -> None:
    world = make_world(engine, other_engine, 9, 100, faults=5)
    world.write()
    report = audit(engine, [HERE], other_engine, "billing", shared=True)
    assert named(report) == {fault for fault in world.faults if fault[0] != "foreign"}
    assert report.counts["others"] == 5


@pytest.mark.usefixtures("small_stretches")
def test_what_the_inbox_has_twice_is_found_where_no_key_forbids_it(engine: Engine, other_engine: Engine) -> None:
    world = make_world(engine, other_engine, 10, 1_000)
    doubled = world.chance.sample([row[0] for row in world.sent[:1000]], 5)
    for message_id in doubled:
        world.record(message_id, world.now)
        world.fault("doubled", message_id)
    run(other_engine, "ALTER TABLE processed_message DROP CONSTRAINT processed_message_pkey")
    world.write()
    report = audit(engine, [HERE], other_engine, "billing")
    assert named(report) == world.faults
    assert report.counts["doubled"] == 5
    [alone] = audit_inbox(other_engine, "billing")
    assert named(alone) == world.faults


@pytest.mark.usefixtures("small_stretches")
def test_a_rotating_inbox_is_audited_in_all_of_its_generations(engine: Engine, other_engine: Engine) -> None:
    world = make_world(engine, other_engine, 18, 1_000, states=5, faults=3)
    world.write()
    assert InboxConversion(other_engine).forward()
    assert Generations(other_engine).rotate()
    insert = "INSERT INTO processed_message (subscriber_id, message_id) VALUES ('billing', %s)"
    for message_id in world.chance.sample([row[0] for row in world.sent[:1_000]], 4):  # recorded without a look back
        run(other_engine, insert, (message_id,))
        world.fault("doubled", message_id)
    late = world.new_id(at := world.some_time())  # in the generation of today
    sent = "INSERT INTO outbox_sent (message_id, position, destination, headers, body, published_at, sent_at) "
    run(engine, f"{sent} VALUES (%s, 0, %s, '{{}}', '', %s, %s)", (late, HERE, at, at))
    run(other_engine, insert, (late,))
    report = audit(engine, [HERE], other_engine, "billing", limit=1_000)
    assert named(report) == world.faults
    assert Counter(report.counts) == world.counted() + Counter(sent=1, processed=1)
    [alone] = [one for one in audit_inbox(other_engine, limit=1_000) if one.subscriber_id == "billing"]
    alone_faults = {"doubled", "unparked", "unrecorded", "processed_since"}
    assert named(alone) == {fault for fault in world.faults if fault[0] in alone_faults}


@pytest.mark.usefixtures("small_stretches")
def test_an_inbox_is_balanced_by_itself(engine: Engine) -> None:
    world = make_world(engine, engine, 11, 500, states=5, faults=3)
    world.write()
    reports = {report.subscriber_id: report for report in audit_inbox(engine, limit=1_000)}
    assert set(reports) == {"billing", "shipping"}
    assert reports["shipping"].balanced
    assert +Counter(reports["shipping"].counts) == {"processed": 1}
    billing = reports["billing"]
    assert billing.not_judged == ("missing", "overdue", "foreign")
    judged_alone = {"unparked", "unrecorded", "processed_since"}
    assert named(billing) == {fault for fault in world.faults if fault[0] in judged_alone}
    rows = sum(row[0] == "billing" for row in world.recorded)
    states = ("processed", "parked", "expired", "discarded", "unparked")
    assert rows == sum(billing.counts[state] for state in states)


def test_what_the_inbox_may_have_forgotten_is_not_judged(engine: Engine, other_engine: Engine) -> None:
    world = make_world(engine, other_engine, 12, 10)
    horizon = world.now - 150 * HOUR
    for hours, kind in ((151, "forgotten"), (149, "missing")):
        at = world.now - hours * HOUR
        message_id = world.new_id(at)
        world.send(message_id, at)
        if kind == "missing":
            world.fault(kind, message_id)
    world.write()
    run(other_engine, "INSERT INTO inbox_horizon (subscriber_id, horizon) VALUES ('billing', %s)", (horizon,))
    report = audit(engine, [HERE], other_engine, "billing")
    assert report.horizon == horizon
    assert named(report) == world.faults
    assert report.counts["forgotten"] == 2  # the first one that is kept, too


def test_since_leaves_out_what_is_older(engine: Engine, other_engine: Engine) -> None:
    world = make_world(engine, other_engine, 13, 10)
    for hours in (90, 10):
        at = world.now - hours * HOUR
        world.send(world.new_id(at), at)
    world.write()
    for since in (world.now - 50 * HOUR, 50 * HOUR):
        report = audit(engine, [HERE], other_engine, "billing", since=since)
        assert [finding.message_id for finding in report.findings] == [world.sent[-1][0]]
    assert all((time_of(row[0]) or world.now) for row in world.sent)
    with pytest.raises(InvalidConfiguration, match="zone"):
        audit(engine, [HERE], other_engine, "billing", since=datetime(2026, 1, 1))  # noqa: DTZ001 - the subject


def test_leases_are_the_inbox_of_a_ledger(engine: Engine, other_engine: Engine) -> None:
    world = make_world(engine, other_engine, 14)
    lease = (
        "INSERT INTO message_lease (subscriber_id, message_id, fence, attempts, owner, acquired_at, completed_at) "
        "VALUES ('billing', %s, 1, 1, 'test', now() - interval '10 minutes', %s)"
    )
    for state, completed, lease_attempts in (
        ("processed", world.now, None),
        ("retrying", None, None),
        ("parked", None, 3),
        ("processed_since", world.now, 3),
        ("missing", "none", None),
    ):
        at = world.some_time()
        message_id = world.new_id(at)
        world.send(message_id, at)
        if completed != "none":
            run(other_engine, lease, (message_id, completed))
        if lease_attempts is not None:
            world.park(message_id, lease_attempts=lease_attempts)  # type: ignore[arg-type]
        if state in ("processed_since", "missing"):
            world.fault(state, message_id)
    world.write()
    report = audit(engine, [HERE], other_engine, "billing", in_flight=timedelta(0))
    assert named(report) == world.faults
    found = {name: count for name, count in report.counts.items() if count}
    assert found == {"sent": 5, "processed": 2, "retrying": 1, "parked": 1, "missing": 1, "processed_since": 1}


FAILED = (
    "INSERT INTO message_failure (subscriber_id, message_id, attempts, error, last_failed_at) "
    "VALUES ('billing', %s, 1, '', now() - interval '{} hours')"
)
LEASED = (
    "INSERT INTO message_lease (subscriber_id, message_id, fence, attempts, owner, acquired_at, expires_at) "
    "VALUES ('billing', %s, 1, 1, 'test', now() - interval '20 days', now() - interval '{} hours')"
)
RELEASED = (
    "INSERT INTO message_lease (subscriber_id, message_id, fence, attempts, owner, acquired_at) "
    "VALUES ('billing', %s, 1, 1, 'test', now() - interval '{} hours')"
)
PAUSED = (
    "INSERT INTO paused (kind, name, paused_by, paused_at) "
    "SELECT 'subscriber', 'billing', 'test', now() - interval '{} hours' WHERE %s <> ''"
)
REDRIVEN = (
    "INSERT INTO dead_letter (subscriber_id, message_id, reason, redriven_at, error, attempts, source, body, "
    "body_hash, headers, envelope) "
    "VALUES ('billing', %s, 'failed', now() - interval '{} hours', '', 5, 'x', '', '', '{{}}', '{{}}')"
)


@pytest.mark.parametrize(
    ("statement", "hours", "state"),
    [
        pytest.param(FAILED, 0, "retrying", id="failed"),
        pytest.param(FAILED, 0.4, "retrying", id="failed before the longest pause, and less than in_flight"),
        pytest.param(FAILED, 0.6, "overdue", id="failed, and did not come again"),
        pytest.param(FAILED, 13 * 24, "overdue", id="failed nearly two weeks ago"),
        pytest.param(FAILED, 15 * 24, "missing", id="failed two weeks ago"),
        pytest.param(LEASED, -0.1, "retrying", id="under a lease"),
        pytest.param(LEASED, 0.4, "retrying", id="its lease has just run out"),
        pytest.param(LEASED, 0.6, "overdue", id="its lease ran out, and it did not come again"),
        pytest.param(LEASED, 15 * 24, "missing", id="its lease ran out two weeks ago"),
        pytest.param(RELEASED, 0.4, "retrying", id="its lease was released"),
        pytest.param(RELEASED, 0.6, "overdue", id="its lease was released, and it did not come again"),
        pytest.param(PAUSED, 200, "in_flight", id="paused"),
        pytest.param(REDRIVEN, 0.1, "in_flight", id="redriven just now"),
        pytest.param(REDRIVEN, 1, "missing", id="redriven, and lost"),
    ],
)
def test_what_is_on_its_way_is_not_missing(engine: Engine, statement: str, hours: float, state: str) -> None:
    world = make_world(engine, engine, 15)
    at = world.some_time()
    message_id = world.new_id(at)
    world.send(message_id, at)
    world.write()
    run(engine, statement.format(hours), (message_id,))
    report = audit(engine, [HERE], engine, "billing")
    assert {name: count for name, count in report.counts.items() if count} == {"sent": 1, state: 1}
    lost = state in ("missing", "overdue")
    assert named(report) == ({(state, message_id)} if lost else set())
    assert report.balanced is not lost


@pytest.mark.parametrize(
    ("statement", "state"), [(FAILED, "retrying"), (LEASED, "retrying"), (REDRIVEN, "in_flight"), (None, "missing")]
)
def test_what_came_shortly_before_a_pause_waits_for_its_end(engine: Engine, statement: str | None, state: str) -> None:
    world = make_world(engine, engine, 23)
    at = world.now - 90 * HOUR
    message_id = world.new_id(at)
    world.send(message_id, at)
    world.write()
    run(engine, PAUSED.format(50), (message_id,))
    if statement is not None:
        run(engine, statement.format(50.1), (message_id,))
    report = audit(engine, [HERE], engine, "billing")
    assert {name: count for name, count in report.counts.items() if count} == {"sent": 1, state: 1}


def test_what_is_overdue_and_was_discarded_or_sent_again_is_not_lost(engine: Engine) -> None:
    world = make_world(engine, engine, 24)
    discarded, again = (world.new_id(world.now - 5 * HOUR) for _ in range(2))
    world.park(discarded, discarded_at=world.now)
    for message_id in (discarded, again):
        world.send(message_id, world.now - 5 * HOUR)
        world.fail(message_id, world.now - 4 * HOUR)
    world.send(again, world.now)
    world.write()
    report = audit(engine, [HERE], engine, "billing")
    assert report.balanced
    found = {name: count for name, count in report.counts.items() if count}
    assert found == {"sent": 2, "discarded": 1, "in_flight": 1, "sent_again": 1}


def test_what_waits_in_the_outbox_or_was_parked_by_the_relay_is_not_foreign(engine: Engine) -> None:
    world = make_world(engine, engine, 16, 5)
    at = world.some_time()
    for where in ("outbox", "letter", "elsewhere"):
        message_id = world.new_id(at)
        world.record(message_id, at)
        if where == "outbox":
            columns = "lane, message_id, destination, headers, body"
            run(engine, f"INSERT INTO outbox_message ({columns}) VALUES (-5, %s, %s, '{{}}', '')", (message_id, HERE))
        elif where == "elsewhere":
            world.send(message_id, at, ELSEWHERE)
        else:
            world.park(message_id)
            world.letters[-1] = (1, f"txbox:outbox:{HERE}", *world.letters[-1][2:])
    world.write()
    report = audit(engine, [HERE], engine, "billing")
    assert report.balanced
    assert +Counter(report.counts) == world.counts + Counter(unsettled=1, elsewhere=1, waiting=1, undelivered=1)


def test_an_outbox_that_keeps_nothing_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidConfiguration, match="keep_sent"):
        audit(engine, [HERE], engine, "billing")
    with pytest.raises(InvalidConfiguration, match="destinations"):
        audit(engine, HERE, engine, "billing")
    with pytest.raises(InvalidConfiguration, match="limit"):
        audit(engine, [HERE], engine, "billing", limit=-1)


def test_what_was_named_as_missing_can_be_found_by_its_time(engine: Engine) -> None:
    world = make_world(engine, engine, 17)
    at = world.some_time().replace(microsecond=0)
    world.send(world.new_id(at), at)
    world.write()
    [finding] = audit(engine, [HERE], engine, "billing").findings
    assert (finding.kind, finding.at) == (FindingKind.MISSING, at)
    assert time_of(finding.message_id) == at


def test_it_only_reads(engine: Engine, schema_url: str) -> None:
    world = make_world(engine, engine, 19, 20, faults=2)
    world.write()
    url = make_url(schema_url)
    options = f"{url.query['options']} -cdefault_transaction_read_only=on"  # as on a replica
    reader = create_engine(url.update_query_dict({"options": options}))
    try:
        with pytest.raises(DBAPIError, match="read-only"):
            run(reader, "DELETE FROM outbox_sent")
        assert named(audit(reader, [HERE], reader, "billing")) == world.faults
        assert named(audit_inbox(reader, "billing")[0]) < world.faults
    finally:
        reader.dispose()


@pytest.mark.usefixtures("small_stretches")
def test_statements_that_take_too_long_are_made_smaller(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(engine, engine, 20, 500, faults=2)
    world.write()
    real = sides.AuditedDatabase.read
    slow: list[int] = []

    def read(self: Any, statement: str, parameters: Any) -> Any:
        if statement == self.sql.sent_digests:
            inside = [row[0] for row in world.sent if parameters["after"] < row[0] <= parameters["upto"]]
            if len(inside) > 100:
                slow.append(len(inside))
                return real(self, "SELECT pg_sleep(30)", {})
        return real(self, statement, parameters)

    monkeypatch.setattr(sides.AuditedDatabase, "read", read)
    monkeypatch.setattr(sides, "STATEMENT_TIMEOUT", "500ms")
    report = audit(engine, [HERE], engine, "billing")
    assert slow
    assert named(report) == world.faults
    assert Counter(report.counts) == world.counted()
