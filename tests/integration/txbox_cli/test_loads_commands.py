"""The runs of bulk loads, as an operator sees them, finishes them and forgets them, in a real ledger."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from support.program import Ended
from support.spark.bulk_loads import APPLY_ALLOWED, Books, purchases
from txbox.status.bulk_loads import BulkLoads
from txbox_spark.rejects.remarks import Remarks
from txbox_spark.source.run_ledger import FRAME

Txbox = Callable[..., Ended]

COUNTS = ("rejected", "duplicate_in_source", "already_processed", "parked", "expired", "applied", "left")

TABLES = (
    "SELECT count(*) FROM pg_class "
    "WHERE relname LIKE 'bulk_load_staging%' AND relnamespace = current_schema()::regnamespace"
)


def change(engine: Engine, *statements: str) -> None:
    with engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement.replace("%", "%%"))


def one(engine: Engine, query: str) -> Any:
    with engine.connect() as connection:
        return connection.exec_driver_sql(query.replace("%", "%%")).scalar_one()


def begin(engine: Engine, run_id: str, *, subscriber: str = "billing", **columns: str) -> str:
    """Put a run of two chunks and 100 rows into the ledger; ``columns`` are expressions of SQL."""
    values = {
        "rows_read": "100",
        "started_at": f"now() - interval '2 h' + interval '{run_id[-1]} s'",
        **columns,
    }
    change(
        engine,
        f"INSERT INTO bulk_load (run_id, subscriber_id, source, digest, writer, chunks, bounds, {', '.join(values)}) "
        f"VALUES ('{run_id}', '{subscriber}', 'p\x1b.jsonl and 2 more', '', 'copy', 2, '[\"m\"]', "
        f"{', '.join(values.values())})",
    )
    return run_id


REMARKS = json.dumps(Remarks(sample=("no id: \x1b",)).as_json())


def merge(engine: Engine, run_id: str, chunk: int, **counts: int) -> None:
    names = ("rows_read", "rows_rejected", "already_processed", "parked", "applied", "expired")
    values = ", ".join(str(counts.get(name, 0)) for name in names)
    change(
        engine,
        f"INSERT INTO bulk_load_chunk (run_id, chunk, {', '.join(names)}, rejected_sample) "
        f"VALUES ('{run_id}', {chunk}, {values}, '{REMARKS}')",
    )


@pytest.fixture
def runs(engine: Engine) -> dict[str, str]:
    """A run in each state."""
    found = {
        "running": begin(engine, "a10000000001"),
        "stopped": begin(engine, "a20000000002", heartbeat_at="now() - interval '61 s'"),
        "failed": begin(engine, "b30000000003", error="E'chunk 1: no\\nsuch account'"),
        "finished": begin(engine, "c40000000004", subscriber="shipping", finished_at="now()", rows_rejected="2"),
    }
    merge(
        engine,
        found["running"],
        0,
        rows_read=60,
        rows_rejected=3,
        already_processed=10,
        parked=4,
        applied=40,
        expired=5,
    )
    for chunk in (0, 1):
        merge(engine, found["finished"], chunk, rows_read=50, rows_rejected=1, applied=40)
    return found


def test_each_run_has_its_state(txbox: Txbox, runs: dict[str, str]) -> None:
    ended = txbox("loads", "list")
    assert (ended.status, ended.err) == (0, "")
    assert "\x1b" not in ended.out
    headings, *lines = ended.out.splitlines()
    assert headings.split()[:4] == ["run", "state", "subscriber", "source"]
    newest_first = ["finished", "failed", "stopped", "running"]
    assert [line.split()[:2] for line in lines] == [[runs[state], state] for state in newest_first]
    assert "1 of 2" in lines[3]
    assert lines[1].rstrip().endswith("chunk 1: no")
    for state, run_id in runs.items():
        assert [load["run_id"] for load in json.loads(txbox("loads", "list", "--json", "--state", state).out)] == [
            run_id
        ]
    assert len(json.loads(txbox("loads", "list", "--json", "--subscriber", "billing").out)) == 3
    limited = txbox("loads", "list", "--limit", "2").out.splitlines()
    assert len(limited) == 4
    assert limited[3].startswith("there may be more")
    assert txbox("loads", "list", "--subscriber", "nobody").out == "no bulk loads\n"


@pytest.mark.parametrize(
    ("state", "counts"),
    [("running", (3, 2, 6, 4, 5, 40, 40)), ("stopped", (0, 0, 0, 0, 0, 0, 100)), ("finished", (2, 18, 0, 0, 0, 80, 0))],
)
def test_the_counts_of_a_run_add_up(txbox: Txbox, runs: dict[str, str], state: str, counts: tuple[int, ...]) -> None:
    shown = json.loads(txbox("loads", "show", runs[state], "--json").out)
    assert tuple(shown["counts"][name] for name in COUNTS) == counts
    assert shown["counts"]["read"] == sum(counts) == 100


def test_rows_of_writer_jdbc_that_were_staged_twice_count_once(txbox: Txbox, engine: Engine) -> None:
    run_id = begin(engine, "d50000000005", rows_rejected="10")
    merge(engine, run_id, 0, rows_read=95, applied=80)
    counts = json.loads(txbox("loads", "show", run_id, "--json").out)["counts"]
    assert (counts["duplicate_in_source"], counts["left"]) == (10, 0)
    assert counts["read"] == sum(counts[name] for name in COUNTS)


def test_what_postgres_has_refused_of_a_staging_table_is_counted_before_the_run_has_finished(
    txbox: Txbox, engine: Engine
) -> None:
    run_id = begin(engine, "d60000000006", rows_rejected="10")  # found by the survey: no chunk has them
    merge(engine, run_id, 0, rows_read=50, rows_rejected=3, applied=40)
    counts = json.loads(txbox("loads", "show", run_id, "--json").out)["counts"]
    assert tuple(counts[name] for name in COUNTS) == (13, 7, 0, 0, 0, 40, 40)


def test_a_write_of_format_txbox_that_failed_has_counts_that_are_known_and_advice_that_works(
    txbox: Txbox, engine: Engine
) -> None:
    run_id = begin(engine, "e60000000006", error="'a piece has failed'")
    change(
        engine, f"UPDATE bulk_load SET rows_read = NULL, source = '{FRAME}', bounds = '[]' WHERE run_id = '{run_id}'"
    )
    merge(engine, run_id, 0, rows_read=60, rows_rejected=3, already_processed=10, applied=40)
    ended = txbox("loads", "show", run_id)
    assert "--resume" not in ended.out
    assert re.search(r"^ read +unknown  .*\n(.*\n)+ left +unknown  ", ended.out, re.MULTILINE)
    assert "to finish it, write the same events once more" in ended.out
    shown = json.loads(txbox("loads", "show", run_id, "--json").out)
    assert [shown["counts"][name] for name in ("read", *COUNTS)] == [None, 3, 7, 10, 0, 0, 40, None]
    assert shown["finish"] is None
    txbox(
        *("loads", "resume", run_id, "events.jsonl", "--subscriber", "billing", "--message-id", "id"),
        *("--apply", __file__),
    ).failed_in_one_line(1, f"run {run_id} is a write of Spark's format txbox", "write the same events once more")


def test_a_run_is_shown_whole_with_what_finishes_it(txbox: Txbox, runs: dict[str, str]) -> None:
    ended = txbox("loads", "show", "b3")
    assert (ended.status, ended.err) == (0, "")
    assert "\x1b" not in ended.out
    for line in ("state:          failed", "writer:         copy", "error:          chunk 1: no\\nsuch account"):
        assert f"{line}\n" in ended.out
    assert "txbox bulk-load --resume b30000000003 PATH... --subscriber billing --message-id" in ended.out
    assert "rejected: no id: \\x1b" in txbox("loads", "show", runs["running"]).out
    assert "--resume" not in txbox("loads", "show", runs["finished"]).out


def test_what_begins_the_ids_of_several_runs_or_of_none(txbox: Txbox, runs: dict[str, str]) -> None:
    txbox("loads", "show", "a").failed_in_one_line(2, "2 runs begin with 'a'", runs["running"], runs["stopped"])
    txbox("loads", "show", "f").failed_in_one_line(1, "there is no bulk load 'f'", "txbox loads list")
    txbox("loads", "forget", "b", "f").failed_in_one_line(1, "there is no bulk load 'f'")
    assert len(json.loads(txbox("loads", "list", "--json").out)) == 4, "not even the first is forgotten"


def test_only_a_run_that_works_is_kept(txbox: Txbox, engine: Engine, runs: dict[str, str]) -> None:
    change(
        engine, f"CREATE TABLE bulk_load_staging_{runs['stopped']}_1 (message_id text) PARTITION BY RANGE (message_id)"
    )
    ended = txbox("loads", "forget", *runs.values())
    assert ended.status == 1
    assert ended.out.startswith("3 runs forgotten; ")
    assert ended.err.startswith(f"txbox: run {runs['running']} is not forgotten: it is running")
    assert one(engine, "SELECT string_agg(DISTINCT run_id, ' ') FROM bulk_load_chunk") == runs["running"]
    assert one(engine, TABLES) == 0
    assert json.loads(txbox("loads", "forget", "a1", "--force", "--json").out) == {
        "forgotten": [runs["running"]],
        "running": [],
    }
    assert one(engine, "SELECT count(*) FROM bulk_load") == one(engine, "SELECT count(*) FROM bulk_load_chunk") == 0


def test_a_run_that_is_resumed_at_that_moment_is_kept(engine: Engine, runs: dict[str, str], pool: Any) -> None:
    """Whoever resumes it has the row's lock: forgetting waits, and looks at the row again."""
    with engine.begin() as resuming:
        resuming.exec_driver_sql("UPDATE bulk_load SET heartbeat_at = now() WHERE run_id = %s", (runs["stopped"],))
        forgetting = pool.submit(BulkLoads(engine).forget, runs["stopped"])
        while not one(engine, "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'transactionid'"):
            assert not forgetting.done()
    assert forgetting.result(30) is False
    assert one(engine, f"SELECT count(*) FROM bulk_load WHERE run_id = '{runs['stopped']}'") == 1


def test_runs_that_were_finished_long_ago(txbox: Txbox, engine: Engine, runs: dict[str, str]) -> None:
    old = begin(engine, "d50000000005", finished_at="now() - interval '31 days'")
    assert json.loads(txbox("loads", "forget", "--finished-before", "30d", "--json").out)["forgotten"] == [old]
    assert one(engine, "SELECT count(*) FROM bulk_load") == len(runs)
    txbox("loads", "forget").failed_in_one_line(2, "say which runs")
    txbox("loads", "forget", old, "--finished-before", "1d").failed_in_one_line(2, "say which runs")


def test_a_ledger_that_is_not_there(txbox: Txbox) -> None:
    for command in (("list",), ("show", "a"), ("forget", "a"), ("forget", "--finished-before", "1d")):
        txbox("loads", *command, "--prefix", "no_").failed_in_one_line(1, "no_bulk_load does not exist")


@pytest.mark.usefixtures("same_spark")
def test_a_run_that_has_failed_is_shown_and_finished(txbox: Txbox, engine: Engine, tmp_path: Path) -> None:
    books, events = Books(engine), purchases(400)
    lines = [f'{{"event_id":"{id_}","account_id":{account},"amount":{amount}}}\n' for id_, account, amount in events]
    file, script = tmp_path / "events.jsonl", tmp_path / "apply.sql"
    file.write_text("".join([*lines, '{"amount":1}\n']), encoding="utf-8")
    script.write_text(APPLY_ALLOWED, encoding="utf-8")
    last = max(str(id_) for id_, _, _ in events)
    books.run(f"INSERT INTO forbidden VALUES ('{last}')")
    what = (str(file), "--subscriber", "billing", "--message-id", "event_id", "--apply", str(script))
    how = ("--fields", "event_id string, account_id int, amount bigint", "--type", "amount=bigint")
    assert txbox("bulk-load", *what, *how, "--writer", "jdbc", "--chunk-rows", "100").status == 1

    (found,) = json.loads(txbox("loads", "list", "--state", "failed", "--json").out)
    run_id, counts = found["run_id"], found["counts"]
    assert "this one is forbidden" in found["error"]
    assert 0 < found["merged"] < found["chunks"]
    assert counts["applied"] == sum(books.effects().values()) > 0
    assert counts["read"] == 401 == sum(counts[name] for name in COUNTS)
    assert found["staging_table"] in books.staging_tables()

    books.run("DELETE FROM forbidden")
    ended = txbox("loads", "resume", run_id[:6], *what, *how, "--json")
    assert (ended.status, json.loads(ended.out)["attempts"]) == (3, 2), ended.err  # one row is rejected
    books.require_applied(events)
    shown = json.loads(txbox("loads", "show", run_id, "--json").out)
    assert (shown["state"], shown["finish"], shown["staging_table"]) == ("finished", None, None)
    assert tuple(shown["counts"][name] for name in COUNTS) == (1, 0, 0, 0, 0, 400, 0)
    txbox("loads", "resume", "x", *what).failed_in_one_line(2, "there is no bulk load 'x'")  # no hex digit
    txbox("loads", "resume", *what[1:]).failed_in_one_line(2, "name the run: txbox loads resume RUN PATH...")
