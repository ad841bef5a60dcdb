"""``txbox archive``, and what reads an archive: the commands, by a real Spark."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import Engine

from support.postgres.statements import run
from support.program import Ended
from support.spark.archives import ODD_IDS, ago, midnight, tell_story

Txbox = Callable[..., Ended]

pytestmark = pytest.mark.usefixtures("same_spark")

MORE = """
INSERT INTO outbox_sent (message_id, position, destination, headers, body, published_at, sent_at)
SELECT 'more ' || n, 10000 + n, 'orders', '{}', 'x', at, at FROM generate_series(1, 300) AS n
CROSS JOIN LATERAL (SELECT now() - interval '26 h' - n * interval '2 min' AS at) AS times;
INSERT INTO processed_message (subscriber_id, message_id, processed_at)
SELECT 'billing', message_id, sent_at FROM outbox_sent WHERE destination = 'orders'
"""
AUDIT = ("audit", "--destination", "orders", "--subscriber", "billing")


def test_what_is_archived_is_audited_and_reconciled(txbox: Txbox, engine: Engine, tmp_path: Path) -> None:
    tell_story(engine)
    run(engine, MORE)
    run(engine, "DELETE FROM processed_message WHERE message_id = 'more 77'")
    lake = f"{tmp_path}/the lake"
    archived = txbox("archive", lake)
    assert archived.status == 0, archived.err
    assert f"file:{lake} has everything before {midnight():%Y-%m-%d} 00:00 UTC" in archived.out
    again = json.loads(txbox("archive", lake, "--json").out)
    assert (again["days"], again["sent"], again["processed"]) == (0, 0, 0)
    status = txbox("status").out
    assert f"archive: file:{lake} has what is older than {midnight():%Y-%m-%d}, " in status

    # Only the archive has some of it: first of this destination, then of any.
    for forget in ("DELETE FROM outbox_sent WHERE destination = 'orders'", "DELETE FROM outbox_sent"):
        run(engine, forget)
        run(engine, f"DELETE FROM processed_message WHERE processed_at < '{midnight().isoformat()}'")
        audited = txbox(*AUDIT, "--shared", "--archive", lake)
        assert audited.status == 1
        assert "not processed, in the archive: more 77" in audited.out
        assert "NOT BALANCED: 1 message of the archive" in audited.out
    txbox(*AUDIT).failed_in_one_line(1, "no sent messages are kept")
    txbox(
        "audit", "--destination", "nowhere", "--subscriber", "billing", "--archive", lake
    ).failed_in_one_line(1, "nothing was compared for nowhere")  # fmt: skip
    run(engine, "INSERT INTO processed_message (subscriber_id, message_id) VALUES ('billing', 'more 77')")
    repaired = json.loads(txbox(*AUDIT, "--archive", lake, "--json").out)
    assert (repaired["balanced"], repaired["archive"]["archived"]) == (True, 300)

    files = f"{lake}/sent/day={ago(40).date()}"
    what = ("--subscriber", "billing 0", "--message-id", "message_id", "--json")
    reconciled = json.loads(txbox("reconcile", files, *what, "--archive", lake).out)
    assert (reconciled["archived"], reconciled["never_processed"]) == (len(ODD_IDS), len(ODD_IDS) // 2)

    assert txbox("archive", lake, "--release").out.startswith("released: ")
    txbox("archive", lake, "--release").failed_in_one_line(1, "knows no archive at")
    txbox("archive", lake).failed_in_one_line(1, "it was released")
