"""``alembic`` from the root of the repository."""

import io
import logging
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.util import CommandError

from txbox_migrations import LATEST, find_drift

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_database_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TXBOX_DATABASE_URL", raising=False)


def program(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "alembic", *arguments], cwd=ROOT, check=False, capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def config() -> Iterator[Callable[..., Config]]:
    """What alembic makes of its arguments: config("schema=s"); what it prints is in the config's stdout."""
    logger = logging.getLogger("alembic")
    level = logger.level

    def make(*x: str) -> Config:
        out = io.StringIO()
        return Config(ROOT / "alembic.ini", stdout=out, output_buffer=out, cmd_opts=Namespace(x=list(x)))

    yield make
    logger.setLevel(level)


@pytest.mark.parametrize("schema", [None, "Odd schema-%"])
def test_up_and_down_with_the_url_from_the_environment(
    fresh_database: str,
    engine: sa.Engine,
    config: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
    schema: str | None,
) -> None:
    monkeypatch.setenv("TXBOX_DATABASE_URL", fresh_database)
    x = (f"schema={schema}",) if schema else ()
    if schema:
        up = program("-x", x[0], "upgrade", "head")
        assert (up.returncode, up.stdout) == (0, "")
        assert f"-> {LATEST}, Step {LATEST}" in up.stderr
    else:
        command.upgrade(config(), "head")
    with engine.connect() as connection:
        assert find_drift(connection, schema=schema) == []
    current = config(*x)
    command.current(current)
    assert current.stdout.getvalue() == f"{LATEST} (head)\n"
    command.downgrade(config(*x), "base")
    with engine.connect() as connection:
        assert sa.inspect(connection).get_table_names(schema=schema) == []


def test_the_argument_goes_before_the_environment(
    fresh_database: str, engine: sa.Engine, config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TXBOX_DATABASE_URL", "postgresql://nobody@127.0.0.1:1/nowhere")
    command.upgrade(config(f"url={fresh_database}", "prefix=a_"), "head")
    with engine.connect() as connection:
        assert find_drift(connection, prefix="a_") == []


def test_without_a_url_it_says_what_to_do_in_one_line() -> None:
    refused = program("upgrade", "head")
    assert refused.returncode != 0
    assert "TXBOX_DATABASE_URL" in refused.stdout + refused.stderr
    assert "Traceback" not in refused.stderr


def test_our_errors_are_alembics(
    fresh_database: str, engine: sa.Engine, config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TXBOX_DATABASE_URL", fresh_database)
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE dead_letter ()"))
    with pytest.raises(CommandError, match="another alembic history manages"):
        command.upgrade(config(), "head")


def test_sql_needs_no_database(config: Callable[..., Config]) -> None:
    script = config("schema=billing")
    command.upgrade(script, "head", sql=True)
    assert "CREATE TABLE billing.processed_message" in script.output_buffer.getvalue()
    assert script.output_buffer.getvalue().strip().endswith("COMMIT;")


def test_alembic_ini_names_no_database_and_no_machine() -> None:
    text = (ROOT / "alembic.ini").read_text()
    assert "sqlalchemy.url" not in text
    assert str(ROOT) not in text
