"""What subscribers did by the inbox alone: HTTP services, Celery, Lambda and bulk loads have no worker that reports."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sqlalchemy import Connection

from txbox.postgres.sql_files import SqlFile
from txbox.status.activity import ActivityStatements, stretch_seconds
from txbox_dashboard.reader import Reader

LOOKED_AT_BLOCKS = 500
"""Blocks read at the end of the inbox: 4 MB, some 40,000 messages. A new row goes where there is room, mostly there."""


class InboxActivityStatements(SqlFile, file="inbox_activity.sql", fragments_of=ActivityStatements):
    parts: str
    recorded: str
    recorded_in_generation: str


class InboxActivity(NamedTuple):
    """What the inbox recorded, by subscriber; if not ``exact``, at least that. Times are in seconds since 1970."""

    times: Sequence[int]
    counts: Mapping[str, Sequence[int]]
    last_minute: Mapping[str, int]
    exact: bool


def read_inbox_activity(
    reader: Reader, subscriber_ids: Sequence[str], *, hours: float, stretches: int
) -> InboxActivity | None:
    """Count what subscribers have recorded lately, in stretches as ``read_activity`` has. None: it was not read."""
    seconds = stretch_seconds(hours, stretches)
    sql = InboxActivityStatements.load(reader.schema, reader.prefix)

    def read(connection: Connection) -> InboxActivity:
        parts = connection.exec_driver_sql(sql.parts, {"seconds": seconds}).mappings().all()
        since = parts[0]["newest"] - seconds * (stretches - 1)
        counts: dict[str, list[int]] = {}
        last_minute = dict.fromkeys(subscriber_ids, 0)
        asked = {"seconds": seconds, "since": since, "subscriber_ids": list(subscriber_ids)}
        left, exact = LOOKED_AT_BLOCKS, True
        for part in parts:
            first = max(part["blocks"] - left, 0)
            asked |= {"first": f"({first},0)", "generation": part["generation"]}
            statement = sql.recorded if part["generation"] is None else sql.recorded_in_generation
            for row in connection.exec_driver_sql(statement, asked).mappings():
                place = min((row["begins_at"] - since) // seconds, stretches - 1)
                counts.setdefault(row["subscriber_id"], [0] * stretches)[place] += row["count"]
                last_minute[row["subscriber_id"]] += row["last_minute"]
            left, exact = left - (part["blocks"] - first), first == 0
            if not exact or (part["opened_at"] is not None and part["opened_at"] <= since):
                break
        return InboxActivity([since + place * seconds for place in range(stretches)], counts, last_minute, exact)

    return reader.read("what the inbox recorded", read)
