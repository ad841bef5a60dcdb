"""What `txbox init` writes works: its own tests pass, and its three commands lead to the money, once."""

import compileall
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from support.program import Running
from support.program import txbox as run_process
from support.waiting import wait_until
from txbox_cli.commands.init import KINDS

# `make test-pages` runs them, as does CI; servers of their own, and several programs in a row
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SECONDS = 240
"""For what a program does on a busy machine."""

REPOSITORY = Path(__file__).parents[2]

NOT_FOR_USERS = "S101,S310,T20"
"""Tests assert, and scripts print, and open the URL of their own settings."""

READY = {
    "worker": "Ctrl-C drains and stops",
    "fastapi": "Application startup complete",
    "django": "is at work; Ctrl-C finishes and stops",
}
"""What the second command says when it is at work."""


@pytest.fixture
def environment() -> dict[str, str]:
    """One whose commands are those of this interpreter's installation, and which knows no database."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("TXBOX_", "AWS_"))}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    return {
        **mine,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{mine['PATH']}",
        "PYTEST_ADDOPTS": "-p no:asyncio",  # which warns of settings that a newcomer has no need of
        "UVICORN_PORT": port,
        "SERVICE_URL": f"http://127.0.0.1:{port}",
    }


def written(kind: str, directory: Path) -> list[str]:
    """Write a service; return the commands that are printed."""
    options = [] if kind == "worker" else [f"--{kind}"]
    ended = run_process("init", *options, cwd=directory)
    assert ended.status == 0, ended.err
    return re.findall(r"^  (.+)$", ended.out, re.M)


def pasted(line: str, directory: Path, environment: Mapping[str, str]) -> str:
    """Run a line that ends by itself, and return what it prints."""
    ended = subprocess.run(
        ["bash", "-c", line],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


@contextmanager
def at_work(
    line: str, says: str, directory: Path, environment: Mapping[str, str], *, ends: signal.Signals = signal.SIGINT
) -> Iterator[None]:
    """Run a line until the end of the block; then a signal ends it, by default that of Ctrl-C."""
    running = Running("-c", line, command=["bash"], env=environment, cwd=directory, start_new_session=True)
    with running:
        try:
            running.says(says, timeout=SECONDS)
            yield
        finally:
            with suppress(ProcessLookupError):
                os.killpg(running.process.pid, ends)
            running.wait()


@pytest.mark.parametrize("kind", ["worker", "fastapi"])
def test_its_own_tests_pass(kind: str, environment: dict[str, str], tmp_path: Path) -> None:
    written(kind, tmp_path)
    assert "3 passed" in pasted("pytest -W error", tmp_path, environment)


def test_djangos_own_tests_pass(environment: dict[str, str], fresh_database: str, tmp_path: Path) -> None:
    written("django", tmp_path)
    known = {**environment, "TXBOX_DATABASE_URL": fresh_database, "QUEUE_URL": "https://sqs.invalid/1/purchases"}
    said = pasted("python -W error manage.py test", tmp_path, known)
    assert "Ran 2 tests" in said
    assert said.endswith("OK\nDestroying test database for alias 'default'...\n")


@pytest.mark.parametrize("kind", READY)
def test_the_three_commands_add_the_money_once(kind: str, environment: dict[str, str], tmp_path: Path) -> None:
    dev, service, send = written(kind, tmp_path)
    with (
        at_work(dev, "ready; ", tmp_path, environment),
        at_work(service, READY[kind], tmp_path, environment, ends=signal.SIGKILL),  # which waits for no long poll
    ):
        said = pasted(send, tmp_path, environment)
        assert said.count('201 {"cents":2500}') == (2 if kind == "fastapi" else 0)
        wait_until(lambda: accounts(tmp_path) == [("ann", 2500)], "the purchase is added")
        wait_until(lambda: is_settled(tmp_path, environment), "what was sent twice is settled", every=0.2)
        assert accounts(tmp_path) == [("ann", 2500)]


def test_the_three_commands_of_a_function_add_the_money_once(environment: dict[str, str], tmp_path: Path) -> None:
    dev, send, tests = written("lambda", tmp_path)
    with at_work(dev, "ready; ", tmp_path, environment):
        said = pasted(send, tmp_path, environment)
    assert said == 2 * "{'batchItemFailures': []}\n" + "ann has 25.00\n"
    assert "3 passed" in pasted(tests, tmp_path, environment)


@pytest.mark.parametrize("kind", ["worker", "fastapi", "django", "lambda"])
def test_without_the_environment_a_script_says_where_to_get_it(
    kind: str, environment: dict[str, str], tmp_path: Path
) -> None:
    written(kind, tmp_path)
    ended = subprocess.run(
        [sys.executable, "send.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert re.search(r"\w+_URL is not set: run `source dev.env` first", ended.stderr.splitlines()[-1])


def accounts(directory: Path) -> list[tuple[str, int]]:
    """What the accounts hold, in the database that the commands have started."""
    words = shlex.split((directory / "dev.env").read_text())
    (url,) = [word.partition("=")[2] for word in words if word.startswith("TXBOX_DATABASE_URL=")]
    engine = create_engine(url)
    try:
        with engine.connect() as connection:
            found = connection.execute(text("SELECT account_id, cents FROM account"))
            return [(account_id, cents) for account_id, cents in found]
    finally:
        engine.dispose()


def is_settled(directory: Path, environment: Mapping[str, str]) -> bool:
    said = pasted('source dev.env && txbox status --queue "$QUEUE_URL"', directory, environment)
    return "queue: 0 waiting, 0 delivered, 0 delayed" in said


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_writes_is_good_python(kind: str, tmp_path: Path) -> None:
    written(kind, tmp_path)
    assert compileall.compile_dir(tmp_path, quiet=1)
    rules = ["--config", str(REPOSITORY / "pyproject.toml"), "--config", 'src = ["."]', "--no-cache"]
    for check in (["check", "--ignore", NOT_FOR_USERS], ["format", "--diff", "--config", "line-length = 88"]):
        ruff = [sys.executable, "-m", "ruff", *check, *rules, "."]
        ended = subprocess.run(ruff, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
