"""``txbox dev``: a database and a queue for a day's work, and nothing left when it ends, however it ends."""

import json
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import NullPool, create_engine

import txbox_migrations
from support.ordinary_user import reachable_directory
from support.program import COMMAND, Running
from support.program import txbox as run_process
from support.waiting import wait_until

pytestmark = pytest.mark.chaos

READY = "Ctrl-C stops"
UNPRIVILEGED = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")


@pytest.fixture
def dev(monkeypatch: pytest.MonkeyPatch, reachable: Path) -> Iterator[Callable[..., Running]]:
    """Start ``txbox dev`` and wait until it is ready; at the end its servers are gone before their directory is."""
    for name in ("TXBOX_DATABASE_URL", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_SQS"):
        monkeypatch.delenv(name, raising=False)
    started: list[Running] = []
    servers: list[psutil.Process] = []

    def start(*arguments: str, **options: Any) -> Running:
        running = Running("dev", *arguments, **options)
        started.append(running)
        running.says(READY)
        wait_until(lambda: printed_all(running, arguments), "all that it prints")
        servers.extend(family(running))
        return running

    yield start
    for running in started:
        with suppress(psutil.NoSuchProcess):
            servers.extend(family(running))
        running.__exit__()
    assert all_gone(servers)


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A directory that the database's user can reach."""
    with reachable_directory() as directory:
        yield directory


def printed_all(running: Running, arguments: Sequence[str]) -> bool:
    """Whether we have read what it prints before it says, on the other stream, that it is ready."""
    printed = "".join(running.out)
    if "--json" in arguments:
        return printed.endswith("}\n")
    queues = [name for option, name in pairwise(arguments) if option == "--queue"]
    last = "TXBOX_DATABASE_URL" if "--no-aws" in arguments else "AWS_DEFAULT_REGION"
    return f"export {last}=" in printed and all(f"/{name}\n" in printed for name in queues)


def exports(running: Running) -> dict[str, str]:
    """What a shell would export that is given the printed lines."""
    words = [shlex.split(line) for line in running.out if line.startswith("export ")]
    return dict(assignment.split("=", 1) for _, assignment in words)


def family(running: Running) -> list[psutil.Process]:
    return psutil.Process(running.process.pid).children(recursive=True)


def all_gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=60)
    return not alive


def directory_of(running: Running) -> Path:
    (line,) = [line for line in running.err if READY in line]
    return Path(line.split()[4])


def query(environment: dict[str, str], statement: str) -> list[Any]:
    url = environment["TXBOX_DATABASE_URL"].replace("+psycopg", "")
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(statement)  # type: ignore[call-overload]
        return cursor.fetchall() if cursor.description else []


def test_what_it_prints_works(dev: Callable[..., Running]) -> None:
    running = dev("--queue", "orders", "--queue", "orders.fifo", env={"AWS_ENDPOINT_URL_SQS": "http://127.0.0.1:1"})
    assert "unset AWS_ENDPOINT_URL_SQS\n" in running.out  # which would have come first
    environment = exports(running)
    urls = [environment["QUEUE_URL_ORDERS"], environment["QUEUE_URL_ORDERS_FIFO"]]
    assert [url.rpartition("/")[2] for url in urls] == ["orders", "orders.fifo"]
    assert environment["QUEUE_URL"] == urls[0]
    for url in urls:
        ended = run_process("status", "--queue", url, env=environment)
        assert (ended.status, ended.err) == (0, "")
        assert ended.out == "inbox: 0 rows\nqueue: 0 waiting, 0 delivered, 0 delayed\n"
    assert run_process("db", "check", env=environment).status == 0


@pytest.mark.parametrize("take_over", ['. "$0"', 'eval "$(cat "$0")"'], ids=["source", "eval"])
def test_a_shell_can_take_it_over(dev: Callable[..., Running], tmp_path: Path, take_over: str) -> None:
    running = dev("--queue", "orders")
    (tmp_path / "dev.env").write_text("".join(running.out))
    ended = subprocess.run(
        [
            "sh",
            "-euc",
            f'{take_over}\nexec {shlex.join(COMMAND)} status --queue "$QUEUE_URL"',
            str(tmp_path / "dev.env"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "inbox: 0 rows\nqueue: 0 waiting, 0 delivered, 0 delayed\n"


def test_without_aws_it_is_postgres_alone(dev: Callable[..., Running]) -> None:
    printed = json.loads("".join(dev("--no-aws", "--json").out))
    assert (list(printed["environment"]), printed["queues"]) == (["TXBOX_DATABASE_URL"], {})
    assert run_process("db", "check", env=printed["environment"]).status == 0
    run_process("dev", "--no-aws", "--queue", "orders").failed_in_one_line(2, "leave out --queue and --aws-port")


def test_as_json_and_a_port_that_is_in_use_is_refused(dev: Callable[..., Running]) -> None:
    printed = json.loads("".join(dev("--json", "--queue", "orders").out))
    environment = printed["environment"]
    assert environment["QUEUE_URL"] == environment["QUEUE_URL_ORDERS"] == printed["queues"]["orders"]
    assert run_process("status", "--queue", printed["queues"]["orders"], env=environment).status == 0
    port = environment["TXBOX_DATABASE_URL"].rpartition(":")[2].partition("/")[0]
    aws_port = environment["AWS_ENDPOINT_URL"].rpartition(":")[2]
    for option, taken in (("--port", port), ("--aws-port", aws_port)):
        ended = run_process("dev", option, taken)
        ended.failed_in_one_line(1, f"port {taken} of 127.0.0.1 is in use: name another port")


def test_where_own_migrations_make_the_tables_it_makes_none(dev: Callable[..., Running], reachable: Path) -> None:
    running = dev("--no-tables", "--data", str(reachable / "data"))
    environment = exports(running)
    assert query(environment, "SELECT to_regclass('processed_message')") == [(None,)]
    engine = create_engine(environment["TXBOX_DATABASE_URL"], poolclass=NullPool)
    with engine.begin() as connection:
        txbox_migrations.upgrade(Operations(MigrationContext.configure(connection)), to=txbox_migrations.LATEST)
    running.signal(signal.SIGINT)
    assert running.wait() == 0
    refused = run_process("dev", "--data", str(reachable / "data"))
    refused.failed_in_one_line(1, "another alembic history manages txbox's tables", "give --no-tables")
    again = dev("--no-tables", "--data", str(reachable / "data"))
    assert query(exports(again), "SELECT count(*) FROM processed_message") == [(0,)]


@pytest.mark.skipif(
    not UNPRIVILEGED.exists() or int(UNPRIVILEGED.read_text()) <= 80, reason="every user may use port 80 here"
)
def test_a_port_that_ordinary_users_may_not_use_is_refused() -> None:
    run_process("dev", "--port", "80").failed_in_one_line(1, "txbox: port 80 of 127.0.0.1 is not for ordinary users")


@pytest.fixture
def full_disk(reachable: Path) -> Iterator[Path]:
    """A disk too small for a database."""
    disk = reachable / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=5m,mode=1777", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a disk, and not in every container")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_the_first_thing_that_is_said(full_disk: Path) -> None:
    run_process("dev", env={"TMPDIR": str(full_disk)}).failed_in_one_line(1, "txbox: the disk is full")
    run_process("dev", "--data", str(full_disk / "data")).failed_in_one_line(1, "txbox: the disk is full")
    with suppress(OSError), (full_disk / "rest").open("wb", buffering=0) as file:  # not even a password has room now
        while True:
            file.write(bytes(4096))
    run_process("dev", "--data", str(full_disk / "other")).failed_in_one_line(1, "txbox: the disk is full")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_however_it_ends_nothing_is_left(dev: Callable[..., Running], number: signal.Signals) -> None:
    running = dev()
    assert "QUEUE_URL" not in exports(running)
    processes, directory = family(running), directory_of(running)
    assert len(processes) > 4  # two keepers, two servers, and PostgreSQL's own
    assert directory.exists()
    running.signal(number)
    orderly = number == signal.SIGINT
    assert running.wait() == (0 if orderly else -number)
    assert all_gone(processes)
    assert not directory.exists()
    assert ("stopped\n" in running.err) == orderly


def test_the_data_are_kept_where_asked(dev: Callable[..., Running], reachable: Path) -> None:
    for end in (signal.SIGTERM, signal.SIGKILL):
        running = dev("--data", str(reachable / "data"))
        environment = exports(running)
        query(environment, "CREATE TABLE IF NOT EXISTS kept (n int)")
        query(environment, "INSERT INTO kept VALUES (1)")
        running.signal(end)
        running.wait()
    again = dev("--data", str(reachable / "data"))
    assert query(exports(again), "SELECT count(*) FROM kept") == [(2,)]
