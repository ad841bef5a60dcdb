"""Bulk loads on a real cluster: its executors, tasks that are killed and run again, tasks that run twice at once."""

import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine

from support.spark.cluster_loads import (
    GATE,
    ROWS,
    SPECIAL,
    SPECULATING,
    assert_exact,
    at_the_gate,
    emptied,
    execute,
    failed_tasks,
    open_gate,
    python_without,
    request,
    rows,
    speculated,
    stopped_in_copy,
    wait_in_the_merge,
)
from support.spark.spark_cluster import HOSTS, Cluster, client_of, executor_of, host_of
from support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def wait_before_the_first_claim(engine: Engine) -> None:
    """Have the first attempt at the last chunk wait at the gate before it has claimed it."""
    execute(
        engine,
        "CREATE SEQUENCE arrival",
        f"CREATE FUNCTION wait_at_gate() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        f"IF nextval('arrival') = 1 THEN PERFORM pg_advisory_xact_lock({GATE}); END IF; RETURN NEW; END $$",
        "CREATE TRIGGER gate BEFORE INSERT ON bulk_load_chunk FOR EACH ROW "
        "WHEN (NEW.chunk = 3) EXECUTE FUNCTION wait_at_gate()",
    )


def wait_in_the_commit_of_staging(engine: Engine) -> None:
    """Have each task that stages the special event wait at the gate in its COMMIT, when it has nothing else to do."""
    execute(
        engine,
        f"CREATE FUNCTION wait_at_gate() RETURNS trigger LANGUAGE plpgsql AS "
        # Shared: those that wait here go on together.
        f"$$ BEGIN PERFORM pg_advisory_xact_lock_shared({GATE}); RETURN NULL; END $$",
        f"""
CREATE FUNCTION watch_staging() RETURNS event_trigger LANGUAGE plpgsql AS $$
DECLARE made record;
BEGIN
  FOR made IN SELECT object_identity FROM pg_event_trigger_ddl_commands()
    WHERE object_type = 'table' AND object_identity ~ 'bulk_load_staging_[0-9a-f]+_[0-9]+_[0-9]+$'
  LOOP
    EXECUTE format('CREATE CONSTRAINT TRIGGER gate AFTER INSERT ON %%s DEFERRABLE INITIALLY DEFERRED FOR EACH ROW '
      'WHEN (NEW.message_id = %%L) EXECUTE FUNCTION wait_at_gate()', made.object_identity, '{SPECIAL}');
  END LOOP;
END $$""",
        "CREATE EVENT TRIGGER watch_staging ON ddl_command_end WHEN TAG IN ('CREATE TABLE') "
        "EXECUTE FUNCTION watch_staging()",
    )


# --- which writer ----------------------------------------------------------------------------------------------------


def test_auto_is_copy_where_executors_have_psycopg_and_jdbc_elsewhere(
    cluster: Cluster, engine: Engine, fresh_database: str, tmp_path: Path
) -> None:
    with cluster.driver() as driver:
        report = driver.load(**request(fresh_database, writer="auto"))
        assert (report["writer"], report["writer_reason"]) == ("copy", "the executors have psycopg and reach Postgres")
        assert_exact(engine, report)

        emptied(engine)
        report = driver.load(**request(fresh_database, writer="auto"), python=python_without(tmp_path, "psycopg"))
        assert report["writer"] == "jdbc"
        assert report["writer_reason"].endswith(" has no psycopg")
        assert_exact(engine, report)

        bare = tmp_path / "bare"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
        report = driver.load(**request(fresh_database, writer="auto"), python=str(bare / "bin" / "python"))
        assert report["writer"] == "jdbc"
        assert " has no " in report["writer_reason"]
        assert report["applied"] == 0
        report = driver.load(**request(fresh_database, writer="auto"), python="/nowhere/python")
        assert report["writer"] == "jdbc"
        assert report["writer_reason"].startswith("the executors run no Python")
    ran_on = {event["Task Info"]["Host"] for event in driver.events("TaskStart")}
    assert ran_on == set(HOSTS)


# --- tasks that are killed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", ["the Python worker", "the executor"])
def test_a_task_of_copy_that_is_killed_in_the_merge_is_run_again(
    cluster: Cluster, engine: Engine, fresh_database: str, gate: Connection, victim: str
) -> None:
    wait_in_the_merge(engine)
    with cluster.driver() as driver:
        driver.ask(**request(fresh_database, writer="copy"))
        (backend,) = at_the_gate(engine)
        worker = client_of(engine, backend)
        (executor_of(worker) if victim == "the executor" else worker).kill()
        # The next attempt waits for the transaction of the first, whose end Postgres has not noticed.
        claiming = f"SELECT FROM pg_stat_activity WHERE {backend} = ANY (pg_blocking_pids(pid))"
        wait_until(lambda: rows(engine, claiming), "the next attempt", timeout=120)
        open_gate(gate)
        report = driver.answer()
    assert_exact(engine, report)
    assert report["attempts"] == 1, "Spark ran the task again, and not bulk_load the tasks"
    assert failed_tasks(driver), "a task has failed"


def test_a_task_of_copy_that_is_killed_in_its_copy_is_run_again(
    cluster: Cluster, engine: Engine, fresh_database: str
) -> None:
    with cluster.driver() as driver:
        driver.ask(**request(fresh_database, writer="copy"))
        _, worker = stopped_in_copy(engine)
        worker.kill()
        report = driver.answer()
    assert_exact(engine, report)
    assert report["attempts"] == 1
    assert failed_tasks(driver)


def test_a_staging_task_that_is_killed_in_its_commit_stages_its_rows_twice(
    cluster: Cluster, engine: Engine, fresh_database: str, gate: Connection
) -> None:
    wait_in_the_commit_of_staging(engine)
    with cluster.driver() as driver:
        driver.ask(**request(fresh_database, writer="jdbc"))
        (backend,) = at_the_gate(engine)
        executor_of(client_of(engine, backend)).kill()
        at_the_gate(engine, 2)  # the second attempt; Postgres goes on to commit for the first, which is dead
        open_gate(gate)
        report = driver.answer()
    assert_exact(engine, report)
    assert failed_tasks(driver)
    assert staged(engine) > ROWS - report["rejected"], "rows were staged twice"


def staged(engine: Engine) -> int:
    ((count,),) = rows(engine, "SELECT sum(rows_read) FROM bulk_load_chunk")
    return int(count)


# --- executors that die as often as Spark bears ---------------------------------------------------------------------


def kill_executor_at_the_gate(engine: Engine, seen: set[int]) -> None:
    """Kill the executor whose task waits at the gate, but for those that did so before."""
    arrived = wait_until(lambda: set(at_the_gate(engine)) - seen, "a task at the gate", timeout=120)
    seen |= arrived
    executor_of(client_of(engine, min(arrived))).kill()


def test_deaths_of_executors_end_a_load_only_if_no_chunk_is_merged_between(
    cluster: Cluster, engine: Engine, fresh_database: str, gate: Connection
) -> None:
    wait_in_the_merge(engine)
    asked = request(fresh_database, writer="copy")
    seen: set[int] = set()
    with cluster.driver(spark__task__maxFailures="1") as driver:
        driver.ask(**asked)
        at_the_gate(engine)
        others = "SELECT FROM bulk_load_chunk HAVING count(*) = 3"
        wait_until(lambda: rows(engine, others), "the other chunks are merged", timeout=60)
        kill_executor_at_the_gate(engine, seen)
        kill_executor_at_the_gate(engine, seen)  # the load has gone on, and now nothing is merged between
        error = str(driver._answer()["error"])
        assert error.startswith("ExecutorsLost: Spark failed: "), error
        assert "(3 of 4 chunks are merged" in error
        open_gate(gate)
        ((run, attempts),) = rows(engine, "SELECT run_id, attempts FROM bulk_load")
        assert attempts == 2
        report = driver.load(**asked, resume=run)
    assert_exact(engine, report)


def test_events_are_staged_again_if_executors_die_as_often_as_spark_bears(
    cluster: Cluster, engine: Engine, fresh_database: str, gate: Connection
) -> None:
    wait_in_the_commit_of_staging(engine)
    with cluster.driver(spark__task__maxFailures="1") as driver:
        driver.ask(**request(fresh_database, writer="jdbc"))
        kill_executor_at_the_gate(engine, set())
        open_gate(gate)
        report = driver.answer()
    assert_exact(engine, report)
    assert report["attempts"] == 2


# --- tasks that run twice at once ------------------------------------------------------------------------------------


def test_a_speculative_attempt_waits_for_the_first_and_finds_the_chunk_done(
    cluster: Cluster, engine: Engine, fresh_database: str, gate: Connection
) -> None:
    wait_in_the_merge(engine)
    with cluster.driver(**SPECULATING) as driver:
        driver.ask(**request(fresh_database, writer="copy"))
        (first,) = at_the_gate(engine)
        waiting = f"SELECT pid FROM pg_stat_activity WHERE {first} = ANY (pg_blocking_pids(pid))"
        ((second,),) = wait_until(lambda: rows(engine, waiting), "the speculative attempt", timeout=120)
        assert {host_of(client_of(engine, one)) for one in (first, second)} == set(HOSTS)
        open_gate(gate)
        report = driver.answer()
    assert_exact(engine, report)
    assert speculated(driver)


def test_a_speculative_attempt_that_is_faster_merges_and_the_first_finds_the_chunk_done(
    cluster: Cluster, engine: Engine, fresh_database: str, gate: Connection
) -> None:
    wait_before_the_first_claim(engine)
    with cluster.driver(**SPECULATING) as driver:
        driver.ask(**request(fresh_database, writer="copy"))
        (first,) = at_the_gate(engine)
        report = driver.answer()  # the gate is still closed
        assert_exact(engine, report)
        assert at_the_gate(engine) == [first]
        open_gate(gate)
        ended = f"SELECT FROM pg_stat_activity WHERE pid = {first}"
        wait_until(lambda: not rows(engine, ended), "the end of the first attempt", timeout=60)
    assert_exact(engine, report)
    assert speculated(driver)
    assert "TaskKilled" in [event["Task End Reason"]["Reason"] for event in driver.events("TaskEnd")]


def test_a_speculative_staging_task_stages_its_rows_twice(
    cluster: Cluster, engine: Engine, fresh_database: str, gate: Connection
) -> None:
    wait_in_the_commit_of_staging(engine)
    with cluster.driver(**SPECULATING) as driver:
        driver.ask(**request(fresh_database, writer="jdbc"))
        both = at_the_gate(engine, 2)
        assert {host_of(client_of(engine, one)) for one in both} == set(HOSTS)
        open_gate(gate)
        report = driver.answer()
    assert_exact(engine, report)
    assert speculated(driver)
    assert staged(engine) > ROWS - report["rejected"], "rows were staged twice"
