"""Bulk loads on a cluster as people run them: TLS, what executors lack, few connections, hosts that freeze or are full.

Tasks that are killed, and that run twice at once, are in ``tests/integration/txbox_spark/runtime/test_cluster.py``.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import psycopg
import pytest
from sqlalchemy import Connection, Engine, make_url

from support.postgres.tls_postgres import ROOT, behind_tls
from support.spark import cluster_loads
from support.spark.cluster_loads import (
    APPLY,
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
    stopped_in_copy,
    wait_in_the_merge,
)
from support.spark.spark_cluster import (
    HOSTS,
    Cluster,
    Driver,
    client_of,
    executor_of,
    host_of,
    processes_of,
    spark_cluster,
    spark_submit,
)
from support.waiting import wait_until

pytestmark = pytest.mark.timeout(400)

BESIDE_CHUNKS = 4
"""Connections of the driver for the ledger, the heartbeat and the progress, as the documentation has it."""
LOGIN_SECONDS, LOOKS_SECONDS = 0.5, 0.1
"""How long a connection lasts at least, and how often they are counted."""
NOTICED = {
    "spark__network__timeout": "15s",
    "spark__network__timeoutInterval": "2s",
    "spark__executor__heartbeatInterval": "3s",
    "spark__shuffle__io__maxRetries": "1",
    "spark__shuffle__io__retryWait": "1s",
}
"""A host that is silent for 15 seconds is given up, in place of two minutes."""


cluster, engine, gate = cluster_loads.cluster, cluster_loads.engine, cluster_loads.gate


@pytest.fixture(scope="module")
def tls(database_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A URL that leads to the server through TLS, and the folder of the root certificate."""
    folder = tmp_path_factory.mktemp("tls")
    with behind_tls(database_url, folder) as url:
        yield url, folder


@pytest.fixture(scope="class")
def driver(cluster: Cluster, tls: tuple[str, Path]) -> Iterator[Driver]:
    """A driver whose executors get the root certificate with ``spark.files``: into the folder that they work in.

    Other drivers get no executors before it has ended.
    """
    _, folder = tls
    with cluster.driver(cwd=folder, spark__files=str(folder / ROOT)) as driver:
        yield driver


@pytest.fixture
def secure_url(tls: tuple[str, Path], fresh_database: str) -> str:
    """The test's database through TLS; the file of the root certificate is named as executors have it."""
    url = make_url(tls[0]).set(database=make_url(fresh_database).database)
    return url.update_query_dict({"sslrootcert": ROOT}).render_as_string(hide_password=False)


@contextmanager
def connections_counted(engine: Engine, driver: Driver, url: str) -> Iterator[dict[str, int]]:
    """Count the connections that the driver and the executors have at most, until the block ends.

    Each of them lasts for a while: its session sleeps when it begins.
    """
    execute(
        engine,
        "CREATE FUNCTION last_a_while() RETURNS event_trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN PERFORM pg_sleep({LOGIN_SECONDS}); END $$",
        "CREATE EVENT TRIGGER last_a_while ON login EXECUTE FUNCTION last_a_while()",
    )
    most = {"driver": 0, "executors": 0}
    ended = threading.Event()
    port, own = make_url(url).port, os.getpid()

    def side(pid: int) -> str:
        return "driver" if pid in (driver.pid, *drivers) else "executors"

    drivers = {one.pid for one in psutil.Process(driver.pid).children(recursive=True)}

    def count() -> None:
        while not ended.wait(LOOKS_SECONDS):
            found = [
                side(one.pid)
                for one in psutil.net_connections("tcp")
                if one.raddr and one.raddr.port == port and one.pid not in (None, own) and one.status == "ESTABLISHED"
            ]
            for each in most:
                most[each] = max(most[each], found.count(each))

    counting = threading.Thread(target=count)
    counting.start()
    try:
        yield most
    finally:
        ended.set()
        counting.join()
        with suppress(Exception):
            execute(engine, "DROP EVENT TRIGGER last_a_while", "DROP FUNCTION last_a_while")


# --- TLS, and packages -----------------------------------------------------------------------------------------------


class TestWithOneDriver:
    """Its executors have the root certificate, and other drivers get none meanwhile."""

    def test_driver_and_executors_check_the_certificate_of_postgres_in_few_connections(
        self, driver: Driver, engine: Engine, secure_url: str, tmp_path: Path
    ) -> None:
        """Spark runs four tasks at once, and two may connect: those that ask for the writer, and those that load.

        The proxy takes nothing but TLS, and nothing else leads to the URL's port. Where executors lack psycopg, they
        cannot copy, and jdbc needs none.
        """
        few = {"parallelism": 2, "chunk_rows": 1_000}
        with connections_counted(engine, driver, secure_url) as most:
            report = driver.load(**request(secure_url, writer="auto", **few), python=sys.executable)
        assert report["writer"] == "copy"
        assert_exact(engine, report)
        assert 1 <= most["executors"] <= 2, most
        assert 1 <= most["driver"] <= BESIDE_CHUNKS, most

        emptied(engine)
        without = python_without(tmp_path, "psycopg")
        error = driver.refused(**request(secure_url, writer="copy"), python=without)
        assert error.startswith("SparkSetupError: writer copy cannot run: executor ")
        assert " has no psycopg; give the executors a Python that has txbox[spark]: --archives " in error
        assert rows(engine, "SELECT FROM bulk_load") == [], "it is refused before a run begins"

        with connections_counted(engine, driver, secure_url) as most:
            report = driver.load(**request(secure_url, writer="jdbc", **few), python=without)
        assert_exact(engine, report)
        assert 1 <= most["executors"] <= 2, most
        assert 1 <= most["driver"] <= BESIDE_CHUNKS + 2, most  # it merges what executors have staged

    @pytest.mark.slow
    def test_format_txbox_checks_the_certificate_of_postgres(
        self, driver: Driver, engine: Engine, secure_url: str
    ) -> None:
        driver.load(
            rows=2_000,
            distinct=2_000,
            format={"url": secure_url, "apply": "INSERT INTO effect SELECT event_id FROM fresh_event"},
        )
        ids = sorted(f"e{number:07}" for number in range(2_000) if number % 97 < 96 and number % 10)
        assert sorted(rows(engine, "SELECT event_id FROM effect")) == [(one,) for one in ids]

    @pytest.mark.slow
    def test_a_certificate_that_executors_do_not_have_is_named(
        self, driver: Driver, engine: Engine, secure_url: str, tls: tuple[str, Path]
    ) -> None:
        _, folder = tls
        (folder / "local.pem").write_bytes((folder / ROOT).read_bytes())  # the driver works in this folder
        url = make_url(secure_url).update_query_dict({"sslrootcert": "local.pem"}).render_as_string(hide_password=False)
        assert "local.pem" in driver.refused(**request(url, writer="jdbc"), python=sys.executable)
        assert rows(engine, "SELECT FROM effect") == []


# --- what executors lack ---------------------------------------------------------------------------------------------


def python_of_dependencies(folder: Path) -> Path:
    """Return a Python that has what txbox needs, and not txbox: it is installed where it is edited."""
    place = folder / "dependencies"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--copies", str(place)], check=True)
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(f"{Path(psycopg.__file__).parents[1]}\n")
    return place


def wheel(folder: Path) -> Path:
    """Build the wheel."""
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], cwd=root, check=True)
    (built,) = folder.glob("*.whl")
    return built


def events_in_files(folder: Path) -> Path:
    """Write more events than the driver merges by itself."""
    path = folder / "events.jsonl"
    path.write_text("".join(f'{{"event_id": "e{number:07}", "amount": 1}}\n' for number in range(1, 24_000, 2)))
    return path


@pytest.mark.slow
def test_the_wheel_and_an_environment_reach_the_executors_by_spark_submit(
    cluster: Cluster, engine: Engine, fresh_database: str, tmp_path: Path
) -> None:
    job = tmp_path / "job.py"
    job.write_bytes((Path(__file__).parents[3] / "spark" / "txbox_spark" / "job.py").read_bytes())
    events = events_in_files(tmp_path)
    bare = python_of_dependencies(tmp_path) / "bin" / "python"
    built = wheel(tmp_path)
    zipped = tmp_path / "txbox.zip"
    zipped.write_bytes(built.read_bytes())
    arguments = [str(job), str(events), "--subscriber", "billing", "--message-id", "event_id", "--writer", "copy"]
    arguments += ["--fields", "event_id text, amount bigint", "--parallelism", "2"]

    def submit(effect: str, *options: str, python: str = str(bare)) -> str:
        env = {"TXBOX_DATABASE_URL": fresh_database, "PYSPARK_PYTHON": python, "PYSPARK_DRIVER_PYTHON": str(bare)}
        given = [*options, *arguments, "--apply", effect]
        ended = spark_submit(cluster, *given, env=env, cwd=tmp_path)
        return f"{ended.returncode}: {ended.stdout}"

    effect = tmp_path / "effect.sql"
    effect.write_text("INSERT INTO effect SELECT event_id FROM fresh_event")

    # The driver finds a .whl, and executors do not: pyspark passes over names that it does not know.
    said = submit(str(effect), "--py-files", str(built))
    assert said.startswith("1: "), said
    assert "has no txbox; send them the wheel, named .zip, for Spark ignores a .whl: --py-files txbox.zip" in said

    said = submit(str(effect), "--py-files", str(zipped))
    assert said.startswith("0: "), said
    assert "writer copy" in said
    assert len(rows(engine, "SELECT FROM effect")) == 12_000

    # An environment of its own, unpacked by Spark where the executors work; it is found by a relative path.
    environment = tmp_path / "dependencies"
    (packages,) = environment.glob("lib/python*/site-packages")
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(zipped), str(packages)], check=True)
    subprocess.run(["tar", "-czf", str(tmp_path / "environment.tar.gz"), "-C", str(environment), "."], check=True)
    execute(engine, "TRUNCATE effect, processed_message, bulk_load, bulk_load_chunk")
    said = submit(str(effect), "--archives", "environment.tar.gz#environment", python="./environment/bin/python")
    assert said.startswith("0: "), said
    assert len(rows(engine, "SELECT FROM effect")) == 12_000


# --- connections -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_executors_that_come_while_tasks_wait_open_no_more_connections(
    cluster: Cluster, engine: Engine, fresh_database: str
) -> None:
    dynamic = {
        "spark__dynamicAllocation__enabled": "true",
        "spark__dynamicAllocation__shuffleTracking__enabled": "true",
        "spark__dynamicAllocation__minExecutors": "0",
        "spark__dynamicAllocation__maxExecutors": str(len(HOSTS)),
        "spark__dynamicAllocation__executorIdleTimeout": "2s",
        "spark__dynamicAllocation__shuffleTracking__timeout": "5s",
        "spark__dynamicAllocation__schedulerBacklogTimeout": "1s",
        "spark__scheduler__minRegisteredResourcesRatio": "0",
    }
    with cluster.driver(**dynamic) as driver:
        for _ in range(2):  # the second time, executors have gone meanwhile
            with connections_counted(engine, driver, fresh_database) as most:
                report = driver.load(**request(fresh_database, writer="copy", parallelism=3, chunk_rows=500))
            assert_exact(engine, report)
            assert 1 <= most["executors"] <= 3, most
            emptied(engine)
            wait_until(lambda: not executors(driver), "the executors go", timeout=120)
    assert len(driver.events("ExecutorAdded")) > len(HOSTS)
    assert driver.events("ExecutorRemoved")


def executors(driver: Driver) -> int:
    return len(driver.events("ExecutorAdded")) - len(driver.events("ExecutorRemoved"))


# --- speculation -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_write_by_format_txbox_whose_task_is_speculated_is_exact(
    cluster: Cluster, engine: Engine, fresh_database: str, gate: Connection
) -> None:
    """Both attempts have the piece; the second waits for the ids of the first, and finds them processed."""
    wait_in_the_merge(engine)
    with cluster.driver(**SPECULATING) as driver:
        driver.ask(rows=4_000, distinct=4_000, format={"url": fresh_database, "apply": APPLY})
        (first,) = at_the_gate(engine)
        waiting = f"SELECT pid FROM pg_stat_activity WHERE {first} = ANY (pg_blocking_pids(pid))"
        ((second, *_), *_) = wait_until(lambda: rows(engine, waiting), "the speculative attempt", timeout=120)
        assert {host_of(client_of(engine, one)) for one in (first, second)} == set(HOSTS)
        open_gate(gate)
        driver.answer()
    ids = sorted(f"e{number:07}" for number in range(4_000) if number % 97 < 96 and number % 10)
    assert sorted(rows(engine, "SELECT event_id FROM effect")) == [(one,) for one in ids]


# --- a host that is frozen -------------------------------------------------------------------------------------------


@contextmanager
def frozen(cluster: Cluster, host: str) -> Iterator[list[psutil.Process]]:
    """Stop all that runs on a host; it goes on when the block ends."""
    stopped = processes_of(cluster, host)
    for one in stopped:
        one.suspend()
    try:
        yield stopped
    finally:
        for one in stopped:
            with suppress(psutil.NoSuchProcess):
                one.resume()


def goes_on(engine: Engine, executor: psutil.Process) -> None:
    """Wait until a host that was frozen has learnt that it was given up, and has no session left."""
    wait_until(lambda: not executor.is_running(), "the executor that was given up ends", timeout=120)
    others = (
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend' "
        "AND pid <> pg_backend_pid() AND query !~ 'advisory_unlock|pg_advisory_lock|pg_stat_activity'"
    )
    wait_until(lambda: not rows(engine, others), "no session of the load is left", timeout=120)


@pytest.mark.slow
@pytest.mark.chaos
def test_a_host_that_is_frozen_in_a_merge_is_given_up_and_nothing_is_doubled_when_it_goes_on(
    cluster: Cluster, engine: Engine, fresh_database: str, gate: Connection
) -> None:
    wait_in_the_merge(engine)
    with cluster.driver(**NOTICED) as driver:
        driver.ask(**request(fresh_database, writer="copy", stalled_seconds=5))
        (backend,) = at_the_gate(engine)
        worker = client_of(engine, backend)
        executor = executor_of(worker)
        with frozen(cluster, host_of(worker)):
            open_gate(gate)  # its merge ends in the server, and nobody commits it
            report = driver.answer()
            assert_exact(engine, report)
            assert rows(engine, f"SELECT FROM pg_stat_activity WHERE pid = {backend}") == [], "its session was ended"
        goes_on(engine, executor)
    assert_exact(engine, report)
    assert "ExecutorLostFailure" in failed_tasks(driver)


@pytest.mark.chaos
def test_a_host_that_is_frozen_within_a_copy_does_not_keep_its_chunk(
    cluster: Cluster, engine: Engine, fresh_database: str
) -> None:
    """No time-out of Postgres reaches a server process that reads a COPY."""
    with cluster.driver(**NOTICED) as driver:
        driver.ask(**request(fresh_database, writer="copy", stalled_seconds=3))
        backend, worker = stopped_in_copy(engine)
        executor = executor_of(worker)
        with frozen(cluster, host_of(worker)):
            report = driver.answer()
            assert_exact(engine, report)
            assert rows(engine, f"SELECT FROM pg_stat_activity WHERE pid = {backend}") == [], "its session was ended"
        goes_on(engine, executor)
    assert_exact(engine, report)
    assert "ExecutorLostFailure" in failed_tasks(driver)


# --- a full disk -----------------------------------------------------------------------------------------------------


@pytest.fixture
def full_disks(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Executors' disks with room for the ids of the events and not for the events; the call makes room."""
    places = [tmp_path / f"{host}-local" for host in HOSTS]
    mounted = []
    try:
        for place in places:
            place.mkdir()
            mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(place)]
            if subprocess.run(mount, capture_output=True, check=False).returncode:
                pytest.skip("a file system of its own cannot be mounted: it takes root")
            mounted.append(place)

        def make_room() -> None:
            for place in places:
                subprocess.run(["mount", "-o", "remount,size=200m", str(place)], check=True)

        yield make_room
    finally:
        for place in mounted:
            subprocess.run(["umount", "-l", str(place)], check=False)


@pytest.mark.slow
def test_a_load_whose_executors_have_full_disks_says_so_and_is_resumed(
    full_disks: Callable[[], None], engine: Engine, fresh_database: str, tmp_path: Path
) -> None:
    large = {"spark__shuffle__compress": "false", "spark__files__useFetchCache": "false"}
    with spark_cluster(tmp_path) as cluster, cluster.driver(**large) as driver:
        error = driver.refused(**request(fresh_database, writer="copy"))
        assert "No space left on device" in error
        full_disks()
        ((run_id,),) = rows(engine, "SELECT run_id FROM bulk_load")
        report = driver.load(**request(fresh_database, writer="copy", resume=run_id))
        assert report["run_id"] == run_id
    assert_exact(engine, report)
