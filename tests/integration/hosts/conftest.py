"""A server and its replica, started by the first host that has one."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, make_url

from integration.hosts.shapes import Server
from support.postgres.statements import run
from support.postgres.tables import table_statements
from support.workers.business import TABLES, Business
from txbox.schema import TABLE_NAMES
from txbox_local import LocalPostgres
from txbox_local.postgres.installation import find_installation


@pytest.fixture(scope="session")
def replicated() -> Iterator[Callable[[], tuple[str, str]]]:
    """Return the URLs of a server, whose tables are empty, and of its replica."""
    started: list[tuple[str, str]] = []
    with ExitStack() as stack:

        def start() -> tuple[str, str]:
            if not started:
                started.append(_started(stack))
            engine = create_engine(started[0][0])
            run(engine, f"TRUNCATE effect, {', '.join(TABLE_NAMES)}")
            engine.dispose()
            return started[0]

        yield start


@pytest.fixture
def server(
    schema_url: str,
    engine: Engine,
    business: Business,
    make_database: Callable[..., str],
    replicated: Callable[[], tuple[str, str]],
) -> Server:
    """Where a host's tables are."""
    return Server(schema_url, engine, make_database, replicated)


def _started(stack: ExitStack) -> tuple[str, str]:
    # Not pytest's folder: where root runs the tests, another user runs the server, and pytest locks others out.
    home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="txbox-replica-", ignore_cleanup_errors=True)))
    home.chmod(0o711)
    primary = stack.enter_context(LocalPostgres(home / "first", durable=False))
    engine = create_engine(primary.url)
    run(engine, f"{table_statements()};{TABLES}")
    Business(engine)
    second = home / "second"
    shutil.copytree(primary.directory, second, ignore=shutil.ignore_patterns("data", "lock", "*.log"))
    second.chmod(0o711)
    installation = find_installation()
    if installation.user is not None:
        os.chown(second, installation.user.uid, installation.user.gid)
    plain = make_url(primary.url).set(drivername="postgresql").render_as_string(hide_password=False)
    ended = installation.run(
        "pg_basebackup", f"--dbname={plain}", f"--pgdata={second / 'data'}", "-R", "--checkpoint=fast", "--no-sync"
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    replica = stack.enter_context(LocalPostgres(second, durable=False))
    engine.dispose()
    return primary.url, replica.url
