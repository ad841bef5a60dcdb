"""What the tests of archives share: rows of several days, and what an archive must have of them."""

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

from pyspark.sql import SparkSession
from sqlalchemy import Engine, create_engine

from txbox_spark import read_archive
from txbox_spark.archive.archiver import SETTLE

ODD_IDS = ("it's", "back\\slash", "\\'; --", "100%s", "naïve-Ωμέγα-🎉", "new\nline", " ", "_x", "ä" * 300)

RECORD = """
INSERT INTO processed_message (subscriber_id, message_id, processed_at, fingerprint)
VALUES (%(subscriber)s, %(id)s::text, %(at)s, sha256(convert_to(%(id)s::text, 'UTF8')))
"""
SEND = """
INSERT INTO outbox_sent (message_id, position, destination, key, headers, body, published_at, sent_at)
VALUES (%(id)s, %(position)s, %(destination)s, %(key)s, '{"a": "ä"}', %(body)s, %(at)s, %(at)s)
"""
LEASE = """
INSERT INTO message_lease (subscriber_id, message_id, fence, attempts, owner, acquired_at, completed_at)
VALUES ('shipping', %(id)s, 1, 1, 'me', %(at)s, %(at)s)
"""


def midnight() -> datetime:
    """Where the days end that are archived: within an hour after a midnight, the day before is not yet."""
    return (datetime.now(UTC) - SETTLE).replace(hour=0, minute=0, second=0, microsecond=0)


def ago(days: int, **more: float) -> datetime:
    """A time of the day so many days before that, at its begin and so much later."""
    return midnight() - timedelta(days=days) + timedelta(**more)


def times() -> list[datetime]:
    """When things happened. The last one is not archived."""
    last_moment = ago(9, hours=23, minutes=59, seconds=59, microseconds=999_999)
    return [ago(40), ago(9, hours=7), last_moment, ago(8), ago(3, hours=12), ago(1), ago(1, hours=23), ago(0)]


def tell_story(engine: Engine) -> None:
    """Rows of several days in all tables, and some of today."""
    with engine.begin() as connection:
        for number, at in enumerate(times()):
            for index, odd in enumerate(ODD_IDS):
                values: dict[str, Any] = {"id": f"{odd}-{number}", "at": at, "subscriber": f"billing {index % 2}"}
                connection.exec_driver_sql(RECORD, values)
                values |= {
                    "position": number * 100 + index,
                    "key": None if index % 2 else odd,
                    "body": bytes([index, 0]),
                }
                connection.exec_driver_sql(SEND, {**values, "destination": f"queue {index % 3}"})
            connection.exec_driver_sql(LEASE, {"id": f"lease-{number}", "at": at})


SENT = "SELECT message_id, position, destination, key, headers::text, body, published_at, sent_at FROM outbox_sent"
PROCESSED = """
SELECT subscriber_id, message_id, processed_at, 'processed', fingerprint FROM processed_message
UNION ALL SELECT subscriber_id, message_id, completed_at, 'processed', NULL FROM message_lease
WHERE completed_at IS NOT NULL
"""


def in_postgres(engine: Engine, statement: str, before: datetime) -> list[tuple[Any, ...]]:
    with engine.connect() as connection:
        rows = [tuple(row) for row in connection.exec_driver_sql(statement.replace("%", "%%"))]
    times = [next(value for value in reversed(row) if isinstance(value, datetime)) for row in rows]
    return sorted(
        [(*row, str(at.astimezone(UTC).date())) for row, at in zip(rows, times, strict=True) if at < before], key=repr
    )


def in_archive(spark: SparkSession, folder: str, *, plainly: bool = False) -> tuple[list[Any], list[Any]]:
    """The rows of an archive, with their days; ``plainly`` as Spark reads folders that it knows nothing of."""
    if plainly:
        frames = [spark.read.parquet(f"{folder}/{kind}") for kind in ("sent", "processed")]
    else:
        found = read_archive(spark, folder)
        frames = [found.sent(), found.processed()]
    lists = []
    for frame in frames:
        moments = [name for name, kind in frame.dtypes if kind == "timestamp"]
        rows = frame.selectExpr(
            *(f"unix_micros({name}) AS {name}" if name in moments else name for name in frame.columns)
        )
        lists.append(sorted((_plain(row.asDict(), moments) for row in rows.collect()), key=repr))
    return lists[0], lists[1]


def _plain(row: dict[str, Any], times: list[str]) -> tuple[Any, ...]:
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    values = {name: epoch + timedelta(microseconds=row[name]) for name in times}
    given = {name: bytes(value) if isinstance(value, bytearray) else value for name, value in row.items()}
    return tuple({**given, **values, "day": str(row["day"])}.values())


def same(engine: Engine, spark: SparkSession, folder: str, before: datetime | None = None) -> None:
    """Assert that an archive has what Postgres has from before a time, and each row once."""
    utc = create_engine(
        engine.url.update_query_dict({"options": f"{engine.url.query.get('options', '')} -ctimezone=UTC"})
    )
    before = before or midnight()
    expected = in_postgres(utc, SENT, before), in_postgres(utc, PROCESSED, before)
    utc.dispose()
    assert expected[0]
    assert expected[1]
    for plainly in (False, True):
        found = in_archive(spark, folder, plainly=plainly)
        for have, want in zip(found, expected, strict=True):  # a whole list in a message helps nobody
            theirs, ours = Counter(map(repr, want)), Counter(map(repr, have))
            assert have == want, f"missing {[*(theirs - ours)][:3]}, too many {[*(ours - theirs)][:3]}"
