import os
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import psycopg
import pytest
import sqlalchemy as sa

from support.ordinary_user import reachable_directory
from txbox_local import LocalPostgres, LocalServerError
from txbox_local.postgres import local_postgres
from txbox_local.postgres.installation import service_user
from txbox_local.process_keeper import STOP_TIMEOUT_SECONDS


@pytest.fixture(scope="module")
def cluster() -> Iterator[Path]:
    """A directory that has a cluster, and no server at work on it: to create one takes longer than to start it."""
    with reachable_directory() as directory:
        with LocalPostgres(directory / "cluster", durable=False):
            pass
        yield directory / "cluster"


def query(url: str, statement: str) -> object:
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.begin() as connection:
        result = connection.exec_driver_sql(statement)
        return result.scalar() if result.returns_rows else None


def test_it_serves_who_has_the_password_and_leaves_nothing_behind(gone: Callable[[list[psutil.Process]], bool]) -> None:
    with LocalPostgres(durable=False) as server:
        assert query(server.url, "SELECT current_setting('server_version_num')::int >= 180000")
        assert query(server.url, "SHOW fsync") == "off"
        assert query(server.url, "SHOW server_encoding") == "UTF8"
        assert query(server.url, "SHOW listen_addresses") == "127.0.0.1"
        assert query(server.url, "SELECT current_database() || current_user") == "txboxtxbox"
        wrong = server.url.replace("postgresql+psycopg", "postgresql").replace("txbox:", "txbox:x")
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            psycopg.connect(wrong)
        directory = server.directory
        assert stat.S_IMODE((directory / "password").stat().st_mode) == 0o600
        processes = [psutil.Process(server.keeper_pid), psutil.Process(server.pid)]
        user = service_user()
        assert processes[1].uids().real == (user.uid if user is not None else os.geteuid()), "never root"
    assert gone(processes)
    assert not directory.exists()
    server.stop()
    with pytest.raises(RuntimeError, match="not running"):
        _ = server.url


def test_a_named_directory_keeps_data_and_password(reachable: Path) -> None:
    directory = reachable / "kept"
    server = LocalPostgres(directory, settings={"max_connections": "17"})
    with server:
        assert query(server.url, "SHOW fsync") == "on"
        query(server.url, "CREATE TABLE kept AS SELECT 42 AS answer")
        password = sa.make_url(server.url).password
    with server:
        assert query(server.url, "SELECT answer FROM kept") == 42
        assert query(server.url, "SHOW max_connections") == "17"
        assert sa.make_url(server.url).password == password


def test_a_directory_in_use_is_refused(cluster: Path) -> None:
    with LocalPostgres(cluster, durable=False) as server:
        with pytest.raises(LocalServerError, match=f"in use by the server with process id {server.pid}:") as raised:
            LocalPostgres(cluster).start()
        assert raised.value.pid == server.pid
        assert query(server.url, "SELECT 1") == 1


def test_a_port_taken_between_choosing_and_binding(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = local_postgres._free_port
        ports = iter([taken.getsockname()[1]])
        monkeypatch.setattr(local_postgres, "_free_port", lambda: next(ports, None) or free())
        with LocalPostgres(cluster, durable=False) as server:
            assert server.port != taken.getsockname()[1]


def test_a_bad_setting_shows_the_log(cluster: Path) -> None:
    with pytest.raises(LocalServerError, match="unrecognized configuration parameter"):
        LocalPostgres(cluster, settings={"no_such_setting": "1"}).start()
    with LocalPostgres(cluster, durable=False) as server:
        assert query(server.url, "SELECT 1") == 1


def test_a_stale_pid_file_of_another_process(cluster: Path) -> None:
    server = LocalPostgres(cluster, durable=False)
    with server:
        pid_file = server.directory / "data" / "postmaster.pid"
        lines = pid_file.read_text().splitlines()
    # The process id now belongs to another program of the same user, so PostgreSQL alone would refuse to start.
    user = service_user()
    account = {"user": user.uid, "group": user.gid, "extra_groups": []} if user is not None else {}
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, cwd="/", **account) as other:  # type: ignore[call-overload]
        pid_file.write_text("\n".join([str(other.pid), *lines[1:]]) + "\n")
        if user is not None:
            os.chown(pid_file, user.uid, user.gid)
        with server:
            assert query(server.url, "SELECT 1") == 1
        assert other.poll() is None


def test_a_cluster_half_made_is_made_again(reachable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(local_postgres, "DATABASE", "not a name")
        with pytest.raises(LocalServerError, match="syntax error"):
            LocalPostgres(reachable / "half", durable=False).start()
    with LocalPostgres(reachable / "half", durable=False) as server:
        assert query(server.url, "SELECT 1") == 1


def test_a_fork_does_not_stop_the_server_nor_keep_it_alive(
    cluster: Path, gone: Callable[[list[psutil.Process]], bool]
) -> None:
    server = LocalPostgres(cluster, durable=False).start()
    processes = [psutil.Process(server.keeper_pid), psutil.Process(server.pid)]
    read, write = os.pipe()
    fork = os.fork()
    if fork == 0:
        os.close(write)
        server.stop()  # not its own
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    assert query(server.url, "SELECT 1") == 1
    started = time.monotonic()
    server.stop()
    assert time.monotonic() - started < STOP_TIMEOUT_SECONDS, "the keeper never saw its pipe end"
    assert gone(processes)
    os.close(write)
    assert os.waitpid(fork, 0)[1] == 0


def test_killing_the_server_is_noticed_by_stop(cluster: Path) -> None:
    server = LocalPostgres(cluster, durable=False)
    with server:
        os.kill(server.pid, signal.SIGKILL)
    with server:
        assert query(server.url, "SELECT 1") == 1
