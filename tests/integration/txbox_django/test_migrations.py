"""Our tables among Django's migrations."""

from collections.abc import Iterator
from io import StringIO
from typing import Any

import pytest
from django.apps import apps
from django.core.management import CommandError, call_command
from django.db import connections, transaction
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder
from sqlalchemy import NullPool, create_engine, inspect

from support.django_shop import project
from txbox import Inbox, SchemaMissing
from txbox_django import database_engine, operations, orm_worker
from txbox_migrations import LATEST, current_version, find_drift, upgrade_database
from txbox_migrations.steps import BASELINE, STEPS
from txbox_workers.memory_source import MemorySource
from txbox_workers.worker import Worker


@pytest.fixture
def url(fresh_database: str) -> Iterator[str]:
    project.use(fresh_database)
    yield fresh_database
    connections.close_all()


def migrate(*arguments: str) -> None:
    call_command("migrate", "txbox_django", *arguments, verbosity=0)


def state(url: str) -> tuple[int, list[str], list[str]]:
    """Return the version of the tables, what differs from the metadata, and the names of tables."""
    engine = create_engine(url)
    with engine.connect() as connection:
        version = current_version(connection)
        drift = [str(one) for one in find_drift(connection)] if version == LATEST else []
        names = inspect(connection).get_table_names()
    engine.dispose()
    return version, drift, names


def test_forwards_and_backwards(url: str) -> None:
    migrate()
    assert state(url)[:2] == (LATEST, [])
    migrate("zero")
    assert state(url)[2] == ["django_migrations"]
    migrate()
    assert state(url)[:2] == (LATEST, [])


def test_tables_that_are_missing_are_to_be_made_by_migrate(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SchemaMissing, "remedy", SchemaMissing.remedy)
    apps.get_app_config("txbox_django").ready()
    told = r"does not exist; create it with `python manage.py migrate`"
    with pytest.raises(SchemaMissing, match=told), transaction.atomic():
        Inbox("billing").record(connections["default"], "m1")
    engine = database_engine(poolclass=NullPool)
    worker = orm_worker(Worker, MemorySource(), handler=print, inbox=Inbox("billing"), engine=engine)
    with pytest.raises(SchemaMissing, match=told):
        worker.start()
    migrate()
    with connections["default"].cursor() as cursor:
        cursor.execute("ALTER TABLE processed_message DROP dead_letter_id")
    with pytest.raises(SchemaMissing, match=r"bring it up to date with `python manage.py migrate`"):
        worker.start()


def test_there_is_one_for_each_version_and_none_to_make(url: str) -> None:
    names = [name for app, name in MigrationLoader(None).disk_migrations if app == "txbox_django"]
    assert sorted(int(name[:4]) for name in names) == list(range(1, len(STEPS) + 1))
    migrate()
    call_command("makemigrations", "txbox_django", check=True, dry_run=True, verbosity=0)  # exits with 1 otherwise


def test_a_migration_that_fails_leaves_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MigrationRecorder(connections["default"]).ensure_schema()
    before = state(url)

    def fail(*args: object, **options: object) -> None:
        upgrade(*args, **options)
        raise ZeroDivisionError

    upgrade = operations.txbox_migrations.upgrade
    monkeypatch.setattr(operations.txbox_migrations, "upgrade", fail)
    with pytest.raises(ZeroDivisionError):
        migrate()
    assert state(url) == before


def test_tables_that_db_upgrade_made_are_taken_over_once_they_are_handed_over(url: str) -> None:
    upgrade_database(url)
    with pytest.raises(CommandError, match="run DROP TABLE txbox_version"):
        migrate()
    with connections["default"].cursor() as cursor:
        cursor.execute("DROP TABLE txbox_version")
    migrate()
    assert state(url)[:2] == (LATEST, [])


def recorded_of_before(url: str, version: int) -> None:
    """Have a database be as the migrations of before the baseline left it: their records, and the mark of the last."""
    upgrade_database(url, to=BASELINE)
    recorder = MigrationRecorder(connections["default"])
    recorder.ensure_schema()
    for number in range(1, version):
        recorder.record_applied("txbox_django", f"{number:04}_something")
    recorder.record_applied("txbox_django", "0010_responses" if version == BASELINE else f"{version:04}_something")
    with connections["default"].cursor() as cursor:
        cursor.execute("DROP TABLE txbox_version")
        cursor.execute(f"COMMENT ON CONSTRAINT processed_message_pkey ON processed_message IS 'txbox schema {version}'")


def test_tables_of_the_last_migration_of_before_the_baseline_are_taken_over(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded_of_before(url, BASELINE)

    def step_after_the_baseline(*arguments: object, to: int, **options: Any) -> None:
        assert to > BASELINE
        upgrade(*arguments, to=to, **options)

    upgrade = operations.txbox_migrations.upgrade
    with monkeypatch.context() as patch:
        patch.setattr(operations.txbox_migrations, "upgrade", step_after_the_baseline)
        migrate()
    loader = MigrationLoader(connections["default"])
    loader.check_consistent_history(connections["default"])
    assert ("txbox_django", "0001_baseline") in loader.applied_migrations
    assert state(url)[:2] == (LATEST, [])
    migrate("zero")
    assert "processed_message" not in state(url)[2]
    migrate()
    assert state(url)[:2] == (LATEST, [])


def test_tables_of_the_migrations_before_are_refused_in_one_line(url: str) -> None:
    recorded_of_before(url, BASELINE - 1)
    with pytest.raises(CommandError, match=r"^table public\.processed_message is at version 9, .*48c2fd12 first$"):
        migrate()


def test_sqlmigrate_shows_what_would_be_run(url: str) -> None:
    for backwards, statement in ((False, "CREATE TABLE archive ("), (True, "DROP TABLE archive")):
        shown = StringIO()
        call_command("sqlmigrate", "txbox_django", "0001", backwards=backwards, stdout=shown)
        assert statement in shown.getvalue()
    assert state(url)[0] == 0


def test_in_a_schema_of_its_own_with_a_prefix(url: str, settings_of_django: dict[str, str]) -> None:
    shown = StringIO()
    call_command("sqlmigrate", "txbox_django", "0001", stdout=shown)
    assert "CREATE SCHEMA IF NOT EXISTS messaging" in shown.getvalue()

    migrate()
    migrate("zero")
    migrate()  # into the schema that is there now
    engine = create_engine(url)
    with engine.connect() as connection:
        assert current_version(connection, **settings_of_django) == LATEST
    engine.dispose()


@pytest.fixture
def settings_of_django(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    from django.conf import settings

    monkeypatch.setattr(settings, "TXBOX_SCHEMA", "messaging", raising=False)
    monkeypatch.setattr(settings, "TXBOX_PREFIX", "tx_", raising=False)
    return {"schema": "messaging", "prefix": "tx_"}
