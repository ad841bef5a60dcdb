"""Events of a bulk load that are too old to judge: they are counted, and not applied."""

import uuid
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import Engine

from support.spark.bulk_loads import COPY_FIRST, Books, frame, load
from support.txbox.horizon import LONG_AGO, forget, id_of, move_horizon
from txbox import DeadLetter, DeadLetters, InvalidConfiguration, Reason
from txbox.messages.message import time_of_id
from txbox_spark.merging.fresh_event import drop_expired
from txbox_spark.merging.merge_plan import MergeStatements

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NOW = datetime.now(UTC)
COLUMNS = "event_id string, account_id int, amount bigint, made timestamp"


def test_the_server_reads_ids_as_the_inbox_does(engine: Engine) -> None:
    made = id_of(LONG_AGO)
    ids = [made, made.upper(), made.replace("-", ""), f"urn:uuid:{made}", f"URN:UUID:{made}", "a", "", id_of(NOW)]
    ids += [made.replace("-", "", 1), f"{made}0", made[:14] + "4" + made[15:], made[:19] + "c" + made[20:]]
    ids += [str(uuid.UUID(int=7 << 76 | 2 << 62))]
    move_horizon(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql('CREATE TEMPORARY TABLE fresh_event (message_id text COLLATE "C") ON COMMIT DROP')
        connection.exec_driver_sql("INSERT INTO fresh_event SELECT unnest(%s::text[])", (ids,))
        statement = drop_expired(None, MergeStatements.load().behind_horizon)
        count, sample = connection.exec_driver_sql(statement, {"subscriber_id": "billing"}).one()
        left = set(connection.exec_driver_sql("SELECT message_id FROM fresh_event").scalars())
    old = {one for one in ids if (at := time_of_id(one)) is not None and at < NOW - timedelta(days=7)}
    assert len(old) == 5
    assert (left, count, set(sample)) == (set(ids) - old, 5, old)


@pytest.mark.parametrize("writer", COPY_FIRST)
def test_what_was_sent_before_the_horizon_is_counted_and_not_applied(
    spark: "SparkSession", books: Books, engine: Engine, schema_url: str, writer: str
) -> None:
    books.record(["forgotten", "kept"])
    forget(engine, "forgotten")
    letters = DeadLetters(engine)
    number = letters.park(DeadLetter("billing", "redriven", Reason.FAILED, "no", 1, "queue", b""))
    letters.redrive(number or 0, lambda _: None)
    events = [
        ("forgotten", 1, 1, LONG_AGO),
        ("kept", 1, 10, LONG_AGO),
        ("redriven", 1, 100, LONG_AGO),
        ("young", 1, 1_000, NOW),
        ("young", 1, 1_000, NOW),
        ("unknown", 1, 10_000, None),
        (id_of(LONG_AGO), 1, 100_000, None),
        (id_of(NOW), 1, 1_000_000, NOW),
    ]
    report = load(frame(spark, events, COLUMNS), schema_url, writer, sent_at="made")
    assert (report.read, report.duplicate_in_source, report.already_processed) == (8, 1, 1)
    assert (report.expired, report.applied, report.parked, report.rejected) == (2, 4, 0, 0)
    assert books.rows("SELECT expired FROM bulk_load_chunk") == [(2,)]
    applied = ["redriven", "young", "unknown", id_of(NOW)]
    assert Counter(row[0] for row in books.effects().elements()) == Counter(applied)
    assert set(books.inbox()) == {"kept", *applied}
    again = load(frame(spark, events, COLUMNS), schema_url, writer, sent_at="made", apply_expired=True)
    assert (again.expired, again.applied, again.already_processed) == (0, 2, 5)
    assert len(books.inbox()) == 7


def test_the_column_of_times_has_to_be_one(spark: "SparkSession", books: Books, schema_url: str) -> None:
    events = frame(spark, [("a", 1, 1, NOW)], COLUMNS)
    assert books.effects() == Counter()
    for column in ("amount", "nothing"):
        with pytest.raises(InvalidConfiguration, match=r"^bulk_load: sent_at must name a column"):
            load(events, schema_url, "copy", sent_at=column)
