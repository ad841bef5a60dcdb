"""One round of a maintainer: what goes, what stays, and in which order."""

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, make_url

from integration.txbox.maintenance.conftest import KEPT, StartMaintainer, found, left, letter, record
from support.postgres.statements import run, statements_sent
from txbox import DeadLetter, DeadLetters, Expired, Failures, Inbox, InvalidConfiguration, LetterNotFound, Reason
from txbox.dead_letters import LetterFilter, LetterOperations, OperationKind
from txbox.instrumentation import Event, Maintained
from txbox.leases import PostgresLedger
from txbox.maintenance import Retention
from txbox.operations.audit import audit_inbox

DAY = timedelta(days=1)


def test_ids_behind_the_window_go_and_all_others_stay(engine: Engine, make_maintainer: StartMaintainer) -> None:
    record(engine, "billing", "old-", 12_000, days_ago=31)
    record(engine, "mailing", "other-", 3_000, days_ago=900)
    record(engine, "billing", "young-", 2_000, days_ago=29)
    events: list[Event] = []
    report = make_maintainer(Retention(inbox={"billing": KEPT}), hooks=[events.append]).run_once()
    assert left(engine) == {"other-": 3_000, "young-": 2_000}
    assert report.removed["inbox"] == 12_000
    assert [(one.source, one.removed) for one in events if isinstance(one, Maintained)] == [("inbox", 12_000)]


def test_nothing_is_forgotten_without_a_window(engine: Engine, make_maintainer: StartMaintainer) -> None:
    record(engine, "billing", "old-", 1_000, days_ago=9_000)
    make_maintainer().run_once()
    assert left(engine) == {"old-": 1_000}
    assert found(engine, "SELECT count(*) FROM inbox_horizon") == 0


def test_what_was_forgotten_is_not_run_again(engine: Engine, make_maintainer: StartMaintainer) -> None:
    record(engine, "billing", "m-", 10, days_ago=40)
    make_maintainer(Retention(inbox={"billing": KEPT})).run_once()
    assert left(engine) == {}
    now = found(engine, "SELECT now()")
    with engine.connect() as connection, pytest.raises(Expired):
        Inbox("billing").record(connection, "m-7", sent_at=now - timedelta(days=41))
    with engine.begin() as connection:
        assert Inbox("billing").record(connection, "new", sent_at=now - timedelta(days=29))
    assert left(engine) == {"new": 1}


def test_a_named_subscriber_has_its_own_window_and_the_others_that_of_every(
    engine: Engine, make_maintainer: StartMaintainer
) -> None:
    for subscriber in ("a", "b", "c"):
        record(engine, subscriber, f"{subscriber}-", 100, days_ago=40)
    make_maintainer(Retention(inbox={"*": KEPT, "b": timedelta(days=90)})).run_once()
    assert left(engine) == {"b-": 100}
    assert found(engine, "SELECT array_agg(subscriber_id ORDER BY subscriber_id) FROM inbox_horizon") == ["a", "b", "c"]


def test_the_horizon_is_committed_before_the_first_delete(engine: Engine, make_maintainer: StartMaintainer) -> None:
    record(engine, "billing", "old-", 10, days_ago=31)
    with statements_sent(engine) as sent:
        make_maintainer(Retention(inbox={"billing": KEPT})).run_once()
    moved = next(number for number, one in enumerate(sent) if one.startswith("INSERT INTO inbox_horizon"))
    deleted = next(number for number, one in enumerate(sent) if "DELETE FROM processed_message" in one)
    assert "COMMIT" in sent[moved:deleted]
    assert found(engine, "SELECT now() - horizon BETWEEN '30 days' AND '30 days 1 minute' FROM inbox_horizon")


def test_no_id_goes_that_is_not_an_hour_behind_the_horizon(engine: Engine, make_maintainer: StartMaintainer) -> None:
    record(engine, "billing", "near-", 10, days_ago=30 + 0.9 / 24)
    record(engine, "billing", "far-", 10, days_ago=30 + 1.1 / 24)
    make_maintainer(Retention(inbox={"billing": KEPT})).run_once()
    assert left(engine) == {"near-": 10}


def test_a_horizon_never_moves_back_and_has_few_versions(engine: Engine, make_maintainer: StartMaintainer) -> None:
    record(engine, "billing", "m-", 1, days_ago=1)
    make_maintainer(Retention(inbox={"billing": KEPT})).run_once()
    before = found(engine, "SELECT (horizon, xmin)::text FROM inbox_horizon")
    make_maintainer(Retention(inbox={"billing": KEPT})).run_once()
    make_maintainer(Retention(inbox={"billing": timedelta(days=60)})).run_once()
    assert found(engine, "SELECT (horizon, xmin)::text FROM inbox_horizon") == before
    make_maintainer(Retention(inbox={"billing": timedelta(days=20)})).run_once()
    assert found(engine, "SELECT now() - horizon < '21 days' FROM inbox_horizon")


def test_the_row_of_a_letter_that_waits_stays_and_goes_once_it_is_discarded(
    engine: Engine, make_maintainer: StartMaintainer
) -> None:
    letters = DeadLetters(engine)
    numbers = [letters.park(letter(f"m-{number}")) for number in range(3)]
    run(engine, "UPDATE processed_message SET processed_at = now() - interval '900 days'")
    discard = "UPDATE dead_letter SET discarded_at = now() - make_interval(days => %s) WHERE dead_letter_id = %s"
    run(engine, discard, (40, numbers[1]))
    run(engine, discard, (20, numbers[2]))
    maintainer = make_maintainer(Retention(inbox={"billing": KEPT}))
    maintainer.run_once()
    assert found(engine, "SELECT array_agg(message_id ORDER BY message_id) FROM processed_message") == ["m-0", "m-2"]
    with engine.begin() as connection:
        assert not Inbox("billing").record(connection, "m-0"), "it is parked still"


def test_leases_have_a_window_of_their_own_which_moves_the_horizon(
    engine: Engine, make_maintainer: StartMaintainer
) -> None:
    ledger = PostgresLedger("mailing", engine=engine)
    for message_id in ("done", "old", "open"):
        lease = ledger.acquire(message_id, lease_seconds=60).lease
        assert lease is not None
        if message_id != "open":
            ledger.complete(lease, b"result")
    run(
        engine,
        "UPDATE message_lease SET acquired_at = now() - interval '60 days', "
        "completed_at = CASE WHEN message_id = 'old' THEN now() - interval '50 days' ELSE completed_at END",
    )
    record(engine, "mailing", "id-", 10, days_ago=500)
    report = make_maintainer(Retention(leases=timedelta(days=40))).run_once()
    assert found(engine, "SELECT array_agg(message_id ORDER BY message_id) FROM message_lease") == ["done", "open"]
    assert report.removed["leases"] == 1
    assert left(engine) == {"id-": 10}, "a window of leases deletes no ids"
    assert found(engine, "SELECT now() - horizon BETWEEN '40 days' AND '41 days' FROM inbox_horizon")


def test_the_completed_lease_of_a_letter_that_is_open_stays_until_the_letter_is_discarded(
    engine: Engine, make_maintainer: StartMaintainer
) -> None:
    """A redrive has sent it and died before its commit: without the lease, the letter would be redriven once more."""
    letters, ledger = DeadLetters(engine), PostgresLedger("mailing", engine=engine)
    number = letters.park_leased(DeadLetter("mailing", "a", Reason.FAILED, "no", 1, "queue", b""), 1)
    lease = ledger.acquire("a", lease_seconds=60).lease
    assert lease is not None
    ledger.complete(lease)
    run(engine, "UPDATE message_lease SET completed_at = now() - interval '50 days'")
    maintainer = make_maintainer(Retention(leases=timedelta(days=40)))
    assert [task.rows for task in maintainer.plan() if task.task == "leases"] == [0]
    assert maintainer.run_once().removed["leases"] == 0
    with pytest.raises(LetterNotFound, match="processed since"):
        letters.redrive(number, lambda _: pytest.fail("it is not sent"))
    letters.discard(number, note="it was done")
    assert make_maintainer(Retention(leases=timedelta(days=40))).run_once().removed["leases"] == 1


@pytest.mark.parametrize(
    ("retention", "left_over"),
    [
        (Retention(inbox={"billing": KEPT}), {"billing 2", "mailing 31"}),
        (Retention(responses=DAY), set()),
        (Retention(inbox={"*": KEPT}, responses=KEPT * 2), {"billing 2"}),
    ],
)
def test_responses_are_forgotten_by_their_window_and_at_the_latest_with_the_ids(
    engine: Engine, make_maintainer: StartMaintainer, retention: Retention, left_over: set[str]
) -> None:
    for subscriber, days in (("billing", 31), ("billing", 2), ("mailing", 31)):
        record(engine, subscriber, f"{days}-", 1, days_ago=days)
    run(
        engine,
        "INSERT INTO kept_response SELECT subscriber_id, message_id, processed_at, '', 201, '[]', '' "
        "FROM processed_message",
    )
    maintainer = make_maintainer(retention)
    assert [task.rows for task in maintainer.plan() if task.task == "responses"] == [3 - len(left_over)]
    assert maintainer.run_once().removed["responses"] == 3 - len(left_over)
    rows = "SELECT array_agg(subscriber_id || ' ' || split_part(message_id, '-', 1)) FROM kept_response"
    assert set(found(engine, rows) or ()) == left_over


def test_results_are_forgotten_and_their_leases_stay(engine: Engine, make_maintainer: StartMaintainer) -> None:
    ledger = PostgresLedger("mailing", engine=engine)
    for message_id in ("old", "young"):
        lease = ledger.acquire(message_id, lease_seconds=60).lease
        assert lease is not None
        ledger.complete(lease, b"result")
    run(engine, "UPDATE message_lease SET completed_at = now() - interval '2 days' WHERE message_id = 'old'")
    assert make_maintainer(Retention(results=DAY)).run_once().removed["results"] == 1
    rows = "SELECT json_object_agg(message_id, (completed_at IS NOT NULL, result IS NOT NULL)) FROM message_lease"
    assert json.loads(json.dumps(found(engine, rows))) == {
        "old": {"f1": True, "f2": False},
        "young": {"f1": True, "f2": True},
    }


def test_letters_that_are_done_go_after_their_window(engine: Engine, make_maintainer: StartMaintainer) -> None:
    letters = DeadLetters(engine)
    for number in range(5):
        letters.park(letter(f"m-{number}"))
    run(engine, "UPDATE dead_letter SET redriven_at = now() - interval '2 days' WHERE message_id IN ('m-1', 'm-4')")
    run(engine, "UPDATE dead_letter SET discarded_at = now() - interval '2 days' WHERE message_id = 'm-2'")
    run(engine, "UPDATE dead_letter SET redriven_at = now() WHERE message_id = 'm-3'")
    assert PostgresLedger("billing", engine=engine).acquire("m-4", lease_seconds=60).lease, (
        "its attempts are counted from its letter"
    )
    make_maintainer(Retention(letters=DAY)).run_once()
    assert found(engine, "SELECT array_agg(message_id ORDER BY message_id) FROM dead_letter") == ["m-0", "m-3", "m-4"]


def test_the_row_of_a_discarded_letter_that_is_forgotten_goes_on_refusing_its_copies(
    engine: Engine, make_maintainer: StartMaintainer
) -> None:
    letters = DeadLetters(engine)
    numbers = {name: letters.park(letter(name)) or 0 for name in ("discarded", "lost", "waits")}
    letters.discard(numbers["discarded"], note="why")
    run(engine, "UPDATE dead_letter SET discarded_at = now() - interval '2 days' WHERE message_id = 'discarded'")
    make_maintainer(Retention(letters=DAY)).run_once()
    run(engine, "DELETE FROM dead_letter WHERE message_id = 'lost'")
    with engine.begin() as connection:
        assert not Inbox("billing").record(connection, "discarded")
    (report,) = audit_inbox(engine)
    assert {name: count for name, count in report.counts.items() if count} == {
        "discarded": 1,
        "parked": 1,
        "unparked": 1,
    }
    assert [finding.message_id for finding in report.findings] == ["lost"]


def test_a_letter_that_was_redriven_since_the_horizon_stays(engine: Engine, make_maintainer: StartMaintainer) -> None:
    letters = DeadLetters(engine)
    letters.park(letter("before"))
    letters.park(letter("since"))
    run(
        engine,
        "UPDATE dead_letter SET redriven_at = now() - CASE message_id WHEN 'since' THEN interval '20 days' "
        "ELSE interval '40 days' END",
    )
    run(engine, "INSERT INTO inbox_horizon (subscriber_id, horizon) VALUES ('billing', now() - interval '30 days')")
    make_maintainer(Retention(letters=DAY)).run_once()
    assert found(engine, "SELECT array_agg(message_id) FROM dead_letter") == ["since"], "its copy may still be judged"


def test_a_letter_that_holds_its_key_stays_until_its_message_is_processed_or_it_is_discarded(
    engine: Engine, make_maintainer: StartMaintainer
) -> None:
    letters = DeadLetters(engine)
    for name in ("on its way", "done", "given up"):
        letters.park(replace(letter(name), order_key="ann"))
    run(engine, "UPDATE dead_letter SET redriven_at = now() - interval '2 days'")
    run(engine, "UPDATE dead_letter SET order_position = NULL WHERE message_id = 'done'")
    run(engine, "UPDATE dead_letter SET discarded_at = now() - interval '2 days' WHERE message_id = 'given up'")
    make_maintainer(Retention(letters=DAY)).run_once()
    assert found(engine, "SELECT array_agg(message_id) FROM dead_letter") == ["on its way"]


@pytest.mark.parametrize(
    ("windows", "name"),
    [
        ({"inbox": {"billing": timedelta(minutes=59)}}, "inbox"),
        ({"inbox": timedelta(days=30)}, "inbox"),
        ({"leases": timedelta(minutes=59)}, "leases"),
        ({"staging": timedelta(minutes=10)}, "staging must be at least an hour"),
        ({"letters": timedelta(0)}, "letters"),
        ({"sent": 7}, "sent"),
        ({"loads": timedelta(days=40_000)}, "loads"),
    ],
)
def test_a_window_that_cannot_work_is_named(windows: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidConfiguration, match=rf"Retention\.{name}"):
        Retention(**windows)


def test_garbage_goes_after_a_day_without_any_window(engine: Engine, make_maintainer: StartMaintainer) -> None:
    for message_id in ("waits", "done", "done just now"):
        Failures(engine, "billing").fail(message_id, ValueError("no"))
    run(
        engine,
        "UPDATE message_failure SET last_failed_at = now() - interval '2 days' WHERE message_id <> 'done just now'",
    )
    with engine.begin() as connection:
        Inbox("billing").record_many(connection, ["done", "done just now"])
    run(
        engine,
        "INSERT INTO outbox_relay (relay_id, host, pid, seen_at) VALUES ('a', 'h', 1, now() - interval '2 days')",
    )
    run(engine, "INSERT INTO outbox_relay (relay_id, host, pid) VALUES ('b', 'h', 1)")
    run(
        engine,
        "INSERT INTO worker_report (worker_id, subscriber_id, source, host, pid, version, state, seen_at) "
        "SELECT id, 'billing', 'queue', 'h', 1, '1', 'working', now() - age FROM (VALUES ('a', interval '2 days'), "
        "('b', interval '0')) AS worker (id, age)",
    )
    run(
        engine,
        "INSERT INTO bulk_load (run_id, subscriber_id, source, digest, writer, chunks, bounds) "
        "VALUES ('r', 'billing', 's', '', 'copy', 1, '[]')",
    )
    run(
        engine,
        "INSERT INTO bulk_load_chunk (run_id, chunk, merged_at) VALUES ('r', 0, now() - interval '2 days'), "
        "('gone', 0, now() - interval '2 days'), ('gone', 1, now())",
    )
    run(
        engine,
        "INSERT INTO reported_activity (kind, name, minute, figure) SELECT 'outbox', '', now() - age, 'sent' "
        "FROM unnest('{6 days, 8 days}'::interval[]) AS age",
    )
    report = make_maintainer().run_once()
    assert dict(report.removed) == {
        "failures": 1,
        "chunks": 1,
        "relays": 1,
        "workers": 1,
        "activity": 1,
        "staging": 0,
    }
    assert found(engine, "SELECT array_agg(message_id ORDER BY message_id) FROM message_failure") == [
        "done just now",
        "waits",
    ]
    assert found(engine, "SELECT array_agg(run_id || chunk ORDER BY run_id) FROM bulk_load_chunk") == ["gone1", "r0"]
    assert found(engine, "SELECT array_agg(relay_id) FROM outbox_relay") == ["b"]
    assert found(engine, "SELECT array_agg(worker_id) FROM worker_report") == ["b"]


def test_sent_messages_go_after_their_window(engine: Engine, make_maintainer: StartMaintainer) -> None:
    run(
        engine,
        "INSERT INTO outbox_sent (message_id, position, destination, headers, body, published_at, sent_at) "
        "SELECT 'm-' || number, number, 'own:x', '{}', '', now(), now() - make_interval(hours => number) "
        "FROM generate_series(1, 2000) AS number",
    )
    maintainer = make_maintainer(Retention(sent=timedelta(hours=100, minutes=30)), rows_per_transaction=500)
    assert [(one.rows, one.exact) for one in maintainer.plan() if one.task == "sent"] == [(1_900, True)]
    assert maintainer.run_once().removed["sent"] == 1_900
    assert found(engine, "SELECT max(position) FROM outbox_sent") == 100
    assert found(engine, "SELECT removed FROM maintenance WHERE task = 'sent'") == 1_900


def test_finished_loads_go_after_their_window_and_their_chunks_follow(
    engine: Engine, make_maintainer: StartMaintainer
) -> None:
    run(
        engine,
        "INSERT INTO bulk_load (run_id, subscriber_id, source, digest, writer, chunks, bounds, finished_at) "
        "SELECT id, 'billing', 's', '', 'copy', 1, '[]', finished FROM (VALUES ('old', now() - interval '9 days'), "
        "('young', now()), ('open', NULL)) AS run (id, finished)",
    )
    run(
        engine,
        "INSERT INTO bulk_load_chunk (run_id, chunk, merged_at) "
        "SELECT run_id, 0, now() - interval '9 days' FROM bulk_load",
    )
    make_maintainer(Retention(loads=timedelta(days=7))).run_once()
    assert found(engine, "SELECT array_agg(run_id ORDER BY run_id) FROM bulk_load") == ["open", "young"]
    assert found(engine, "SELECT array_agg(run_id ORDER BY run_id) FROM bulk_load_chunk") == ["open", "young"]


def test_finished_operations_go_after_their_window_and_their_selections_follow(
    engine: Engine, make_maintainer: StartMaintainer
) -> None:
    letters = DeadLetters(engine)
    operations = LetterOperations(engine)
    numbers = []
    for name in ("old", "young", "open"):
        letters.park(letter(name))
        selected = operations.select(LetterFilter(message_ids=(name,)), OperationKind.DISCARD, by="ann", note="wrong")
        assert selected is not None
        numbers.append(selected.operation_id)
        if name != "open":
            operations.carry_out(selected.operation_id)
    run(engine, "UPDATE dead_letter_operation SET requested_at = now() - interval '9 days'")
    finished = "UPDATE dead_letter_operation SET finished_at = now() - interval '9 days' WHERE operation_id = %s"
    run(engine, finished, (numbers[0],))
    maintainer = make_maintainer(Retention(operations=timedelta(days=7)))
    assert {one.task: one.rows for one in maintainer.plan()}["operations"] == 1
    assert make_maintainer().run_once().removed.get("operations") is None, "without a window they are kept for ever"
    removed = maintainer.run_once().removed
    assert (removed["operations"], removed["selections"]) == (1, 1)
    assert [one.operation_id for one in operations.list()] == [numbers[2], numbers[1]]
    assert found(engine, "SELECT array_agg(operation_id ORDER BY operation_id) FROM dead_letter_selection") == [
        numbers[1],
        numbers[2],
    ]
    assert operations.carry_out(numbers[2]).finished_at is not None, "it goes on as before"


# --- a dry run, and servers that take no writes ----------------------------------------------------------------------


def test_a_dry_run_counts_what_would_go_and_writes_nothing(engine: Engine, make_maintainer: StartMaintainer) -> None:
    record(engine, "billing", "old-", 7_000, days_ago=31)
    record(engine, "billing", "young-", 100, days_ago=1)
    retention = Retention(inbox={"billing": KEPT}, leases=KEPT, results=KEPT, letters=DAY, loads=DAY)
    maintainer = make_maintainer(retention)
    planned = {one.task: (one.rows, one.exact) for one in maintainer.plan()}
    assert planned["inbox"] == (7_000, True)
    assert found(engine, "SELECT (SELECT count(*) FROM inbox_horizon) + (SELECT count(*) FROM maintenance)") == 0
    removed = maintainer.run_once().removed
    assert removed["inbox"] == 7_000
    assert {one.task for one in maintainer.plan() if one.rows} == set()


def test_a_large_table_is_estimated_by_a_sample(
    engine: Engine, make_maintainer: StartMaintainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txbox.maintenance.sweeper.COUNTED_BLOCKS", 64)
    record(engine, "billing", "old-", 20_000, days_ago=31)
    record(engine, "billing", "young-", 20_000, days_ago=1)
    (planned,) = [one for one in make_maintainer(Retention(inbox={"billing": KEPT})).plan() if one.task == "inbox"]
    assert not planned.exact
    assert 17_000 < planned.rows < 23_000


def test_a_server_that_takes_no_writes_is_named(engine: Engine, make_maintainer: StartMaintainer) -> None:
    read_only = engine.execution_options(postgresql_readonly=True)
    with pytest.raises(InvalidConfiguration, match=r"takes no writes.*the URL of the primary"):
        make_maintainer(engine=read_only).run_once()


def test_nothing_is_forgotten_by_a_clock_that_was_set_forward(
    engine: Engine, schema_url: str, make_maintainer: StartMaintainer
) -> None:
    """The horizon never moves back, and what was sent lately is not judged: it would run again."""
    record(engine, "billing", "m-", 10, days_ago=0)
    for clock in ("now", "clock_timestamp"):
        run(
            engine,
            f"CREATE FUNCTION {clock}() RETURNS timestamptz LANGUAGE sql STABLE AS "
            f"'SELECT pg_catalog.{clock}() + interval $$60 days$$'",
        )
    url = make_url(schema_url)
    forward = create_engine(url.update_query_dict({"options": f"{url.query['options']},pg_catalog"}))
    maintainer = make_maintainer(Retention(inbox={"billing": KEPT}), engine=forward)
    with pytest.raises(InvalidConfiguration, match=r"clock is 1,4[34]\d\.\d hours ahead of this machine's"):
        maintainer.run_once()
    forward.dispose()
    assert left(engine) == {"m-": 10}
    assert found(engine, "SELECT count(*) FROM inbox_horizon") == 0
