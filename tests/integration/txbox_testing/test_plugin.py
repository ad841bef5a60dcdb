"""The pytest plugin, in projects that use it: in two processes, with anyio and pytest-asyncio, and where it is idle."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import Engine

CONFTEST = """
import pytest

@pytest.fixture(scope="session")
def txbox_prepare():
    def prepare(engine):
        with engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE account (account_id text PRIMARY KEY, cents bigint)")
            connection.exec_driver_sql("INSERT INTO account VALUES ('ann', 0)")
    return prepare
"""

PROJECT = """
import pytest
import pytest_asyncio
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine
from txbox import Inbox, Message, Outbox, Outcome
from txbox.relay import FunctionPublisher
from txbox_testing import NotIdempotent, crash_at, duplicate

PURCHASE = Message("p-1", b"")
ADD = text("UPDATE account SET cents = cents + 1")

def apply(session, message):
    session.execute(ADD)

@pytest.fixture
def txbox_inbox():
    return Inbox("billing")

@pytest.fixture
def anyio_backend():
    return "asyncio"

def test_trial(txbox_trial):
    txbox_trial(apply, PURCHASE, faults=[duplicate()])

def test_not_idempotent(txbox_trial, txbox_database):
    own = create_engine(txbox_database)
    def handler(session, message):
        with own.begin() as connection:
            connection.execute(ADD)
    with pytest.raises(NotIdempotent, match="handler is not idempotent"):
        txbox_trial(handler, PURCHASE, faults=[crash_at("handled")])
    own.dispose()

@pytest.mark.anyio
async def test_coroutine(txbox_deliver, txbox_engine):
    assert txbox_deliver(apply, PURCHASE, fault=crash_at("committed")).outcome is Outcome.DUPLICATE
    with txbox_engine.connect() as connection:
        assert connection.execute(text("SELECT cents FROM account")).scalar_one() == 1
        assert connection.execute(text("SELECT subscriber_id FROM processed_message")).scalar_one() == "billing"

@pytest_asyncio.fixture
async def account(txbox_database):
    engine = create_async_engine(txbox_database)
    async def cents():
        async with engine.connect() as connection:
            return await connection.scalar(text("SELECT cents FROM account"))
    yield cents
    await engine.dispose()

async def apply_in_loop(session, message):
    await session.execute(ADD)

@pytest.mark.asyncio
async def test_pytest_asyncio(txbox_deliver, txbox_trial, account):
    delivered = txbox_deliver(apply_in_loop, PURCHASE, fault=crash_at("committed"))
    assert delivered.outcome is Outcome.DUPLICATE
    assert await account() == 1
    txbox_trial(apply_in_loop, Message("p-2", b""), faults=[duplicate()])

def test_relay(txbox_engine, txbox_relay):
    with txbox_engine.begin() as connection:
        Outbox().publish(connection, "own:there", b"")
    assert len(txbox_relay({"own": FunctionPublisher(lambda message: None)}).messages) == 1

def test_queue(txbox_sqs, txbox_queue):
    txbox_sqs.send_message(QueueUrl=txbox_queue, MessageBody="x")
    assert txbox_sqs.receive_message(QueueUrl=txbox_queue)["Messages"][0]["Body"] == "x"
"""

UNUSED = """
def pytest_sessionfinish():
    import sys
    loaded = {name.partition(".")[0] for name in sys.modules}
    assert "txbox_testing" in loaded
    assert not loaded & {"txbox", "txbox_local", "txbox_workers", "sqlalchemy", "psycopg", "boto3", "uuid6"}, loaded
"""


def run_pytest(project: Path, *arguments: str) -> str:
    """Run the tests of a project as its own pytest would, with the plugin as an entry point loads it."""
    paths = os.pathsep.join(path for path in sys.path if path)
    plugins = ("txbox_testing.plugin", "anyio", "pytest_asyncio.plugin", "xdist", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", *(f"-p{plugin}" for plugin in plugins), "-W", "error"]
    command += ["-o", "asyncio_default_fixture_loop_scope=function"]  # else pytest-asyncio warns
    ended = subprocess.run(
        [*command, "-c", os.devnull, "--rootdir", ".", *arguments],
        cwd=project,
        # Other plugins take a second of each process.
        env={
            **os.environ,
            "PYTHONPATH": paths,
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_its_fixtures_work_in_two_processes_with_coroutines_and_without_a_warning(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_project.py").write_text(PROJECT)
    assert "6 passed" in run_pytest(tmp_path, "-n", "2")


def test_a_named_server_is_taken_and_no_database_is_left_there(
    tmp_path: Path, fresh_database: str, admin_engine: Engine
) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_project.py").write_text(PROJECT)
    assert "1 passed" in run_pytest(tmp_path, "-k", "coroutine", "--txbox-postgres", fresh_database)
    with admin_engine.connect() as connection:
        left = connection.exec_driver_sql("SELECT datname FROM pg_database WHERE datname ~ '^txbox_test_'")
        assert left.all() == []


def test_a_project_that_does_not_use_it_imports_nothing_of_it(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(UNUSED)
    (tmp_path / "test_project.py").write_text("def test_nothing(): pass")
    assert "1 passed" in run_pytest(tmp_path)


@pytest.mark.containers
def test_an_image_is_started_in_a_container(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_project.py").write_text(PROJECT)
    image = os.environ.get("TXBOX_TEST_POSTGRES_IMAGE", "postgres:17")
    assert "1 passed" in run_pytest(tmp_path, "-k", "coroutine", "--txbox-postgres", image)
