"""``upgrade_database`` and ``downgrade_database``: our own history, behind ``txbox db upgrade``."""

import re
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypedDict

import pytest
import sqlalchemy as sa
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from sqlalchemy.schema import CreateSchema

import txbox_migrations
from support.waiting import wait_until
from txbox_migrations import (
    LATEST,
    MigrationError,
    VersionChange,
    current_version,
    downgrade_database,
    find_drift,
    migration_sql,
    upgrade_database,
)
from txbox_migrations.steps import BASELINE

PLACES = [(None, ""), ("Odd schema-%", "Odd%_")]
LOCK = 0x7478626F78


class Place(TypedDict):
    schema: str | None
    prefix: str


def relations(engine: sa.Engine) -> list[str]:
    with engine.connect() as connection:
        return list(
            connection.execute(
                sa.text("""
                    SELECT c.relname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
                    WHERE n.nspname NOT LIKE 'pg\\_%' AND n.nspname <> 'information_schema' ORDER BY 1
                """)
            ).scalars()
        )


@pytest.mark.parametrize(("schema", "prefix"), PLACES)
def test_up_and_down_by_url(
    fresh_database: str, engine: sa.Engine, next_version: int, schema: str | None, prefix: str
) -> None:
    place: Place = {"schema": schema, "prefix": prefix}
    assert upgrade_database(fresh_database, **place) == VersionChange(0, LATEST)
    assert upgrade_database(fresh_database, **place, to=next_version) == VersionChange(LATEST, next_version)
    assert upgrade_database(fresh_database, **place, to=next_version) == VersionChange(next_version, next_version)
    assert upgrade_database(fresh_database, **place, to=LATEST) == VersionChange(next_version, next_version)
    with engine.connect() as connection:
        assert find_drift(connection, **place) == []
        assert current_version(connection, **place) == next_version
    assert f"{prefix}txbox_version" in relations(engine)
    assert downgrade_database(fresh_database, **place, to=LATEST) == VersionChange(next_version, LATEST)
    with pytest.raises(
        MigrationError, match=rf"below version {next_version}, .*`txbox db upgrade --to {next_version}`"
    ):
        downgrade_database(fresh_database, **place, to=next_version)
    assert downgrade_database(fresh_database, **place) == VersionChange(LATEST, 0)
    assert relations(engine) == []
    assert downgrade_database(fresh_database, **place) == VersionChange(0, 0)
    assert relations(engine) == []
    assert upgrade_database(fresh_database, **place, to=next_version) == VersionChange(0, next_version)


@pytest.mark.parametrize("isolation_level", ["READ COMMITTED", "SERIALIZABLE", "AUTOCOMMIT"])
def test_an_engine_of_any_isolation_level_will_do_and_the_usual_spellings_of_a_url(
    fresh_database: str, engine: sa.Engine, isolation_level: str
) -> None:
    upgrade_database(engine.execution_options(isolation_level=isolation_level))
    with engine.connect() as connection:
        assert find_drift(connection) == []
    url = fresh_database.replace("postgresql+psycopg://", "postgres://")
    assert upgrade_database(url) == VersionChange(LATEST, LATEST)


@pytest.mark.parametrize("url", ["not a url", "sqlite://", "mysql://root@localhost/x"])
def test_any_other_url_is_refused(url: str) -> None:
    with pytest.raises(MigrationError, match="give postgresql://"):
        upgrade_database(url)


def test_the_hosts_history_is_not_touched(fresh_database: str, engine: sa.Engine) -> None:
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE alembic_version (version_num varchar(32) PRIMARY KEY)"))
        connection.execute(sa.text("INSERT INTO alembic_version VALUES ('1')"))
    upgrade_database(fresh_database)
    with engine.connect() as connection:
        assert connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalars().all() == ["1"]
        assert connection.execute(sa.text("SELECT version_num FROM txbox_version")).scalars().all() == [str(LATEST)]


@pytest.mark.parametrize("isolation_level", ["READ COMMITTED", "AUTOCOMMIT"])
def test_a_run_that_fails_in_between_leaves_nothing(engine: sa.Engine, next_version: int, isolation_level: str) -> None:
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE SCHEMA billing CREATE VIEW made_up AS SELECT 1"))
    options = engine.execution_options(isolation_level=isolation_level)
    with pytest.raises(sa.exc.ProgrammingError, match="already exists"):
        upgrade_database(options, schema="billing", to=next_version)
    assert relations(engine) == ["made_up"]
    with pytest.raises(MigrationError, match=f"below version {LATEST}, .*`txbox db upgrade --to {LATEST}`"):
        downgrade_database(options, schema="not_there", to=LATEST)
    with engine.connect() as connection:
        assert not sa.inspect(connection).has_schema("not_there")


def test_an_existing_schema_needs_no_right_to_create_schemas(fresh_database: str, engine: sa.Engine) -> None:
    role = f"tenant_{engine.url.database}"
    with engine.begin() as connection:
        connection.execute(sa.text(f"CREATE ROLE {role} LOGIN"))
        connection.execute(sa.text(f"CREATE SCHEMA billing AUTHORIZATION {role}"))
    limited = sa.create_engine(engine.url, poolclass=sa.NullPool, connect_args={"options": f"-c role={role}"})
    try:
        assert upgrade_database(limited, schema="billing").after == LATEST
        with limited.connect() as connection:
            assert find_drift(connection, schema="billing") == []
        with pytest.raises(sa.exc.ProgrammingError, match="permission denied"):
            upgrade_database(limited, schema="shipping")
    finally:
        with engine.begin() as connection:
            connection.execute(sa.text(f"DROP OWNED BY {role}"))
            connection.execute(sa.text(f"DROP ROLE {role}"))


@pytest.mark.parametrize("schema", [None, "billing"])
def test_tables_managed_by_the_host_are_refused(fresh_database: str, engine: sa.Engine, schema: str | None) -> None:
    with engine.begin() as connection:
        if schema:
            connection.execute(CreateSchema(schema))
        txbox_migrations.upgrade(Operations(MigrationContext.configure(connection)), schema=schema)
    before = relations(engine)
    for run in (upgrade_database, downgrade_database):
        with pytest.raises(
            MigrationError, match=rf"another alembic history manages .* txbox_migrations\.upgrade\(op, to={LATEST}"
        ):
            run(fresh_database, schema=schema)
    assert relations(engine) == before


@pytest.mark.parametrize(("schema", "prefix"), PLACES)
@pytest.mark.parametrize("change", [txbox_migrations.upgrade, txbox_migrations.downgrade])
def test_a_step_of_the_host_leaves_the_tables_of_our_history_alone(
    fresh_database: str, engine: sa.Engine, change: Callable[..., None], schema: str | None, prefix: str
) -> None:
    place: Place = {"schema": schema, "prefix": prefix}
    upgrade_database(fresh_database, **place)
    before = relations(engine)
    with engine.begin() as connection:
        op = Operations(MigrationContext.configure(connection))
        with pytest.raises(MigrationError, match="two histories cannot") as refused:
            change(op, **place)
    assert relations(engine) == before
    assert upgrade_database(fresh_database, **place).before == LATEST
    remedy = re.search(r"run (DROP TABLE .+) \(`txbox dev", str(refused.value))
    assert remedy is not None
    with engine.begin() as connection:  # as the remedy says, word for word
        connection.exec_driver_sql(remedy[1].replace("%", "%%"))
        change(Operations(MigrationContext.configure(connection)), **place)


def test_tables_moved_behind_our_back_are_refused(fresh_database: str, engine: sa.Engine, next_version: int) -> None:
    upgrade_database(fresh_database)
    with engine.begin() as connection:
        mark = f"COMMENT ON CONSTRAINT processed_message_pkey ON processed_message IS 'txbox schema {next_version}'"
        connection.execute(sa.text(mark))
    told = f"says version {LATEST}, but the tables are at version {next_version}"
    with pytest.raises(MigrationError, match=told):
        upgrade_database(fresh_database)


@pytest.mark.parametrize(
    ("version", "told"), [(7, r" version 10; .*48c2fd12 first$"), (99, r" up to \d+; install the release that made it")]
)
def test_a_database_of_another_release_is_refused_in_one_line_and_stays(
    fresh_database: str, engine: sa.Engine, version: int, told: str
) -> None:
    upgrade_database(fresh_database)
    with engine.begin() as connection:
        connection.execute(sa.text(f"UPDATE txbox_version SET version_num = '{version}'"))
    before = relations(engine)
    for run in (upgrade_database, downgrade_database):
        with pytest.raises(MigrationError, match=f"^txbox_version says version {version}, .*{told}"):
            run(fresh_database)
    assert relations(engine) == before


def test_an_unknown_version_is_refused(fresh_database: str) -> None:
    with pytest.raises(MigrationError, match=f"to=0: .* {BASELINE} to {LATEST}$"):
        upgrade_database(fresh_database, to=0)
    with pytest.raises(MigrationError, match=r"^to=9: .*48c2fd12"):
        upgrade_database(fresh_database, to=9)
    with pytest.raises(MigrationError, match=f"to={LATEST + 1}"):
        upgrade_database(fresh_database, to=LATEST + 1)
    with pytest.raises(MigrationError, match="to=-1"):
        downgrade_database(fresh_database, to=-1)


def waiting_for_the_lock(connection: sa.Connection) -> int:
    waiting = sa.text("""
        SELECT count(*) FROM pg_locks AS l JOIN pg_database AS d ON d.oid = l.database
        WHERE l.locktype = 'advisory' AND NOT l.granted AND d.datname = current_database()
    """)
    return int(connection.execute(waiting).scalar_one())


def test_processes_that_upgrade_at_once_wait_for_each_other(fresh_database: str, engine: sa.Engine) -> None:
    # The worst default for runs that wait: a snapshot taken before the wait shows an empty database after it.
    with engine.begin() as connection:
        connection.exec_driver_sql(
            f"ALTER DATABASE {engine.url.database} SET default_transaction_isolation TO 'repeatable read'"
        )
    program = "import sys, txbox_migrations as m; print(m.upgrade_database(sys.argv[1], schema='billing'))"
    with engine.connect() as holder:
        holder.execute(sa.text(f"SELECT pg_advisory_xact_lock({LOCK})"))
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", program, fresh_database],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for _ in range(3)
        ]
        wait_until(lambda: waiting_for_the_lock(holder) == 3, "three runs waiting for the lock")
        holder.rollback()
    results = [(*process.communicate(timeout=60), process.returncode) for process in processes]
    assert sorted(results) == [
        (f"VersionChange(before=0, after={LATEST})\n", "", 0),
        (f"VersionChange(before={LATEST}, after={LATEST})\n", "", 0),
        (f"VersionChange(before={LATEST}, after={LATEST})\n", "", 0),
    ]
    with engine.connect() as connection:
        assert find_drift(connection, schema="billing") == []


def test_threads_that_upgrade_at_once_wait_for_each_other(engine: sa.Engine) -> None:
    schemas = [None, "billing", "shipping", "billing"]
    together = threading.Barrier(len(schemas))
    # Runs that mix each other up can wait for their own locks: fail then, instead of hanging.
    impatient = sa.create_engine(engine.url, poolclass=sa.NullPool, connect_args={"options": "-c lock_timeout=20s"})

    def run(schema: str | None) -> VersionChange:
        together.wait()
        return upgrade_database(impatient, schema=schema)

    with ThreadPoolExecutor(len(schemas)) as pool:
        results = list(pool.map(run, schemas))
    assert sorted(result.before for result in results) == [0, 0, 0, LATEST]
    assert {result.after for result in results} == {LATEST}
    with engine.connect() as connection:
        assert all(find_drift(connection, schema=schema) == [] for schema in schemas)


@pytest.mark.parametrize(("schema", "prefix"), PLACES)
def test_the_script_does_what_the_run_does(
    fresh_database: str,
    engine: sa.Engine,
    make_staging: Callable[..., list[str]],
    next_version: int,
    schema: str | None,
    prefix: str,
) -> None:
    place: Place = {"schema": schema, "prefix": prefix}

    def run(script: str) -> None:
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            driver_connection: Any = connection.connection.dbapi_connection
            driver_connection.execute(script)

    run(migration_sql(**place))
    run(migration_sql(**place, since=LATEST, to=next_version))
    with engine.connect() as connection:
        assert find_drift(connection, **place) == []
    assert upgrade_database(fresh_database, **place) == VersionChange(next_version, next_version)
    with engine.begin() as connection:
        make_staging(connection, schema, prefix)
    run(migration_sql(**place, since=next_version, to=0))
    assert relations(engine) == []


def test_a_script_for_nothing_is_refused() -> None:
    with pytest.raises(MigrationError, match="nothing to do"):
        migration_sql(since=0, to=0)
    with pytest.raises(MigrationError, match=f"since={LATEST}"):
        migration_sql(since=LATEST)
    with pytest.raises(MigrationError, match=r"^since=9: .*48c2fd12"):
        migration_sql(since=9)
