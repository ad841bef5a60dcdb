"""The roads of the bulk benchmark: psql as the limit, Spark as people use it by hand, and ours."""

import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bulk_events import SUBSCRIBER, BulkEvents
from sqlalchemy import make_url

from txbox_spark import BulkLoadReport, bulk_load
from txbox_spark.runtime.jdbc import jdbc_options

__all__ = ["APPLY", "by_hand", "naive", "ours", "serial", "two_sessions"]

COLUMNS = 'event_id text COLLATE "C", account_id bigint, cents bigint, occurred_at timestamptz'

APPLY = """
UPDATE account SET purchases = account.purchases + new.purchases, cents = account.cents + new.cents
FROM (SELECT account_id, count(*) AS purchases, sum(cents) AS cents FROM fresh_event GROUP BY account_id) AS new
WHERE account.account_id = new.account_id"""

BEST_MERGE = f"""
CREATE TEMPORARY TABLE fresh_event ON COMMIT DROP AS
SELECT DISTINCT ON (event_id) staging.* FROM staging
WHERE NOT EXISTS (
  SELECT FROM processed_message AS processed
  WHERE processed.subscriber_id = '{SUBSCRIBER}' AND processed.message_id = staging.event_id
)
ORDER BY event_id;
INSERT INTO processed_message (subscriber_id, message_id) SELECT '{SUBSCRIBER}', event_id FROM fresh_event;
{APPLY};"""

NAIVE_MERGE = f"""
WITH first AS (
  INSERT INTO processed_message (subscriber_id, message_id) SELECT '{SUBSCRIBER}', event_id FROM staging
  ON CONFLICT DO NOTHING RETURNING message_id
), fresh_event AS (
  SELECT DISTINCT ON (event_id) staging.* FROM staging JOIN first ON first.message_id = staging.event_id
)
{APPLY.strip()};"""

SETTINGS = "SET work_mem = '128MB';"
"""As our own chunks have it."""


def serial(psql: Path, url: str, events: BulkEvents) -> None:
    """Raw COPY of the file into an unlogged staging table, and the best merge, in one session."""
    _psql(
        psql,
        url,
        f"{SETTINGS} CREATE UNLOGGED TABLE staging ({COLUMNS});",
        _copy(events.csv),
        f"BEGIN; {BEST_MERGE} COMMIT;",
    )


def two_sessions(psql: Path, url: str, events: BulkEvents) -> None:
    """The best merge in two sessions at once, each with a half of the file, by id: the limit on two processors."""
    failures: list[Exception] = []

    def half(number: int) -> None:
        try:
            create = f"CREATE TEMPORARY TABLE staging ({COLUMNS}) ON COMMIT DROP;"
            _psql(psql, url, f"{SETTINGS} BEGIN; {create}", _copy(events.half(number)), f"{BEST_MERGE} COMMIT;")
        except subprocess.CalledProcessError as error:
            failures.append(error)

    threads = [threading.Thread(target=half, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def naive(psql: Path, url: str, events: BulkEvents) -> None:
    """Raw COPY of the file, and a merge as it is usually written: ON CONFLICT RETURNING, joined to the aggregate."""
    _psql(
        psql,
        url,
        f"{SETTINGS} CREATE UNLOGGED TABLE staging ({COLUMNS});",
        _copy(events.csv),
        f"BEGIN; {NAIVE_MERGE} COMMIT;",
    )


def by_hand(url: str, frame: Any, rows: int) -> None:
    """What is written by hand today: append over JDBC to a table with a unique index, then upsert row by row.

    Args:
        url: the database.
        frame: the events.
        rows: how many of them: all would take minutes.
    """
    import psycopg

    plain = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(plain) as connection:
        connection.execute(f"CREATE TABLE hand_staging ({COLUMNS}, UNIQUE (event_id))")
    part = frame.limit(rows).dropDuplicates(["event_id"])
    part.write.format("jdbc").options(**jdbc_options(make_url(url))).option("dbtable", "hand_staging").mode(
        "append"
    ).save()
    with psycopg.connect(plain) as connection, connection.cursor(name="rows") as reading:
        writing = connection.cursor()
        reading.execute("SELECT event_id, account_id, cents FROM hand_staging")
        for event_id, account_id, cents in reading:
            writing.execute(
                "INSERT INTO processed_message (subscriber_id, message_id) VALUES (%s, %s) ON CONFLICT DO NOTHING",
                (SUBSCRIBER, event_id),
            )
            if writing.rowcount:
                writing.execute(
                    "UPDATE account SET purchases = purchases + 1, cents = cents + %s WHERE account_id = %s",
                    (cents, account_id),
                )


def ours(frame: Any, url: str, writer: str, chunk_rows: int) -> BulkLoadReport:
    """Our bulk load."""
    return bulk_load(
        frame,
        url=url,
        subscriber_id=SUBSCRIBER,
        message_id="event_id",
        apply=APPLY,
        writer=writer,
        chunk_rows=chunk_rows,
    )


def _copy(file: str) -> str:
    return f"\\copy staging from '{file}' csv"


def _psql(psql: Path, url: str, *script: str) -> None:
    plain = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    command = [str(psql), "--no-psqlrc", "--quiet", "--set", "ON_ERROR_STOP=1", plain]
    subprocess.run(command, input="\n".join(_lines(script)), text=True, check=True, stdout=subprocess.DEVNULL)


def _lines(script: Sequence[str]) -> list[str]:
    """Psql's own commands end with their line, so each part starts one."""
    return [*script, ""]
