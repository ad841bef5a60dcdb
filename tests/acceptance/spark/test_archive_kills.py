"""``txbox archive`` is killed again and again, at random moments; then it is finished."""

import os
import random
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from sqlalchemy import Engine

from support.postgres.statements import run
from support.program import COMMAND, txbox
from support.spark.archives import midnight, same, tell_story
from support.waiting import wait_until

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]  # each run starts a JVM

KILLS = 3
MORE = """
INSERT INTO outbox_sent (message_id, position, destination, headers, body, published_at, sent_at)
SELECT 'more ' || n, 10000 + n, 'queue 0', '{}', 'x', at, at FROM generate_series(1, 20000) AS n
CROSS JOIN LATERAL (SELECT now() - interval '26 h' - n * interval '2 min' AS at) AS times;
INSERT INTO processed_message (subscriber_id, message_id, processed_at)
SELECT 'billing', message_id, sent_at FROM outbox_sent WHERE destination = 'queue 0'
"""


def kill_one(folder: Path, url: str, *, late: bool) -> None:
    """Begin to archive, and kill all of it: while it writes, or ``late``, when days are being moved."""
    began = time.monotonic()
    process = subprocess.Popen(
        [*COMMAND, "archive", str(folder), "--url", url],
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    reached = folder / ("sent" if late else "_txbox")  # Spark's start is the same each time, and of no interest
    wait_until(lambda: reached.exists() or process.poll() is not None, f"{reached} is there", timeout=120)
    time.sleep(random.uniform(0, 0.3 if late else max(1.0, (time.monotonic() - began) / 2)))
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_killed_at_random_moments(engine: Engine, spark: SparkSession, fresh_database: str, tmp_path: Path) -> None:
    tell_story(engine)
    run(engine, MORE)
    folder = tmp_path / "lake 0"
    for number in range(KILLS):
        kill_one(folder, fresh_database, late=number % 2 == 1)
        with engine.connect() as connection:
            kept = connection.exec_driver_sql(
                "SELECT archived_upto FROM archive WHERE location LIKE %s", ("%" + folder.name,)
            )
            upto = kept.scalar()
        assert upto in (None, midnight())
        if upto is not None:  # it was at its end: another one begins
            same(engine, spark, str(folder))
            folder = tmp_path / f"lake {number + 1}"
    txbox("archive", str(folder), "--url", fresh_database).said(0)
    same(engine, spark, str(folder))
