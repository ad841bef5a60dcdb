"""``alembic`` from the root of the repository."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa

from txbox_migrations import find_drift

ROOT = Path(__file__).parents[2]


def alembic(*arguments: str, url: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TXBOX_DATABASE_URL"}
    if url:
        environment["TXBOX_DATABASE_URL"] = url
    return subprocess.run(
        [sys.executable, "-m", "alembic", *arguments],
        cwd=ROOT,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("schema", [None, "Odd schema-%"])
def test_up_and_down_with_the_url_from_the_environment(
    fresh_database: str, engine: sa.Engine, schema: str | None
) -> None:
    where = ("-x", f"schema={schema}") if schema else ()
    up = alembic(*where, "upgrade", "head", url=fresh_database)
    assert (up.returncode, up.stdout) == (0, "")
    assert "Running upgrade 5 -> 6" in up.stderr
    with engine.connect() as connection:
        assert find_drift(connection, schema=schema) == []
    current = alembic(*where, "current", url=fresh_database)
    assert (current.returncode, current.stdout) == (0, "6 (head)\n")
    down = alembic(*where, "downgrade", "base", url=fresh_database)
    assert down.returncode == 0
    with engine.connect() as connection:
        assert sa.inspect(connection).get_table_names(schema=schema) == []


def test_the_argument_goes_before_the_environment(fresh_database: str, engine: sa.Engine) -> None:
    up = alembic(
        *("-x", f"url={fresh_database}", "-x", "prefix=a_", "upgrade", "head"),
        url="postgresql://nobody@127.0.0.1:1/nowhere",
    )
    assert up.returncode == 0, up.stderr
    with engine.connect() as connection:
        assert find_drift(connection, prefix="a_") == []


def test_without_a_url_it_says_what_to_do() -> None:
    refused = alembic("upgrade", "head")
    assert refused.returncode != 0
    assert "TXBOX_DATABASE_URL" in refused.stdout + refused.stderr
    assert "Traceback" not in refused.stderr


def test_our_errors_are_one_line(fresh_database: str, engine: sa.Engine) -> None:
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE dead_letter ()"))
    refused = alembic("upgrade", "head", url=fresh_database)
    assert refused.returncode != 0
    assert "another alembic history manages" in refused.stdout + refused.stderr
    assert "Traceback" not in refused.stderr


def test_sql_needs_no_database() -> None:
    script = alembic("-x", "schema=billing", "upgrade", "head", "--sql")
    assert script.returncode == 0, script.stderr
    assert "CREATE TABLE billing.processed_message" in script.stdout
    assert script.stdout.strip().endswith("COMMIT;")


def test_alembic_ini_names_no_database_and_no_machine() -> None:
    text = (ROOT / "alembic.ini").read_text()
    assert "sqlalchemy.url" not in text
    assert str(ROOT) not in text
