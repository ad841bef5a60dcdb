"""The audit's benchmark: a million messages, and what is wrong with some of them.

Outbox and inbox have the same ids, UUIDs of version 7. Then some are planted, of each kind as many: missing in the
inbox, foreign there, doubled there (its key is taken away for that), and sent again. The audit has to name these alone.
"""

import resource
import time
from collections import Counter
from functools import partial

from sqlalchemy import create_engine

from benchmarks.shared.database import SCHEMA, SUBSCRIBER
from benchmarks.shared.measurements import Row, Sample, Table, WrongResult
from benchmarks.shared.program import Benchmark, Option, Run
from benchmarks.shared.work import in_processes, ready
from txbox.operations.audit import audit

DESTINATION = "own:benchmark"
PLANTED = (0, 1, 100, 10_000)
AUDIT_SECONDS = 15

SENT, INBOX, MADE = f"{SCHEMA}.outbox_sent", f"{SCHEMA}.processed_message", f"{SCHEMA}.made"

# The ids in a random order, of which the first ones are those of the faults. None is of the first 15 minutes that are
# kept: what is foreign there is not judged.
FILL = f"""
DROP TABLE IF EXISTS {MADE};
CREATE TABLE {MADE} AS
SELECT number, at, row_number() OVER (ORDER BY number < 30000, md5(number::text)) - 1 AS place,
  substr(hex, 1, 8) || '-' || substr(hex, 9, 4) || '-7' || substr(random, 1, 3) || '-8' || substr(random, 4, 3) || '-'
    || substr(random, 7, 12) AS message_id
FROM (
  SELECT number, at, lpad(to_hex((extract(epoch FROM at) * 1000)::bigint), 12, '0') AS hex, md5(number::text) AS random
  FROM (
    SELECT number, now() - interval '2 days' + number * interval '50 ms' AS at
    FROM generate_series(1, {{messages}}) AS number
  ) AS timed
) AS hashed;
TRUNCATE {SENT}, {INBOX};
ALTER TABLE {INBOX} DROP CONSTRAINT IF EXISTS processed_message_pkey;
CREATE INDEX IF NOT EXISTS without_key ON {INBOX} (subscriber_id, message_id);
INSERT INTO {SENT} (message_id, position, destination, headers, body, published_at, sent_at)
SELECT message_id, number, '{DESTINATION}', '{{{{}}}}', convert_to(repeat('x', 300), 'UTF8'), at, at FROM {MADE}
ORDER BY number;
INSERT INTO {INBOX} (subscriber_id, message_id, processed_at)
SELECT '{SUBSCRIBER}', message_id, at + interval '10 ms' FROM {MADE} ORDER BY number
"""

# Of each kind those from the place "before" up to "planted", every fourth of which is one kind's.
PLANT = f"""
DELETE FROM {INBOX} AS recorded USING {MADE} AS made
WHERE recorded.message_id = made.message_id AND place % 4 = 0 AND place / 4 >= {{before}} AND place / 4 < {{planted}};
DELETE FROM {SENT} AS sent USING {MADE} AS made
WHERE sent.message_id = made.message_id AND place % 4 = 1 AND place / 4 >= {{before}} AND place / 4 < {{planted}};
INSERT INTO {INBOX} (subscriber_id, message_id, processed_at)
SELECT '{SUBSCRIBER}', message_id, at FROM {MADE}
WHERE place % 4 = 2 AND place / 4 >= {{before}} AND place / 4 < {{planted}};
INSERT INTO {SENT} (message_id, position, destination, headers, body, published_at, sent_at)
SELECT message_id, -1, '{DESTINATION}', '{{{{}}}}', '', at, at FROM {MADE}
WHERE place % 4 = 3 AND place / 4 >= {{before}} AND place / 4 < {{planted}}
"""
KINDS = {0: "missing", 1: "foreign", 2: "doubled", 3: "sent_again"}


class Messages:
    """What is in the tables now, made when it is first asked for."""

    def __init__(self, run: Run) -> None:
        self._run, self._planted = run, -1

    def plant(self, wanted: int) -> set[tuple[str, str]]:
        """Have so many faults of each kind in the tables, and return them, by kind and id."""
        database = self._run.database
        if not 0 <= self._planted <= wanted:
            database.execute(FILL.format(messages=self._run.options["messages"]))
            self._planted = 0
        database.execute(PLANT.format(before=self._planted, planted=wanted))
        self._planted = wanted
        for table in (SENT, INBOX):
            database.execute(f"VACUUM ANALYZE {table}")
        database.checkpoint()
        engine = create_engine(self._run.url)
        with engine.connect() as connection:
            rows = connection.exec_driver_sql(
                f"SELECT mod(place, 4), message_id FROM {MADE} WHERE place / 4 < {wanted}"
            )
            faults = {(KINDS[kind], message_id) for kind, message_id in rows}
        engine.dispose()
        return faults


def audit_once(_number: int, url: str, limit: int) -> tuple[float, float, dict[str, int], set[tuple[str, str]]]:
    """Audit in a process of its own; return its seconds, its growth in megabytes, the counts and what was named."""
    engine = create_engine(url)
    engine.connect().close()
    ready()
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    report = audit(engine, [DESTINATION], engine, SUBSCRIBER, outbox_schema=SCHEMA, inbox_schema=SCHEMA, limit=limit)
    seconds = time.perf_counter() - begun
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return seconds, grown, dict(report.counts), {(one.kind.value, one.message_id) for one in report.findings}


def measured(run: Run, messages: Messages, planted: int) -> Sample:
    """Plant, audit, and compare what was named with what was planted."""
    faults = messages.plant(planted)
    seconds, grown, counts, named = in_processes(1, audit_once, run.url, len(faults))[0]
    expected = Counter(kind for kind, _ in faults)
    found = Counter({kind: counts[kind] for kind in KINDS.values() if counts[kind]})
    if named != faults or found != expected:
        raise WrongResult(f"{planted} of each planted: {found} found, {len(named ^ faults)} named wrongly or not named")
    return Sample(seconds, {"megabytes": grown, "sent": float(counts["sent"]), "processed": float(counts["processed"])})


def tables(run: Run) -> list[Table]:
    """One row for each number of faults; the server starts when the first is measured."""
    messages = Messages(run)
    rows = [
        Row(
            f"{count:,} of each kind",
            partial(measured, run, messages, count),
            at_most=AUDIT_SECONDS,
            unit="s",
            ours=True,
        )
        for count in PLANTED
    ]
    return [Table("seconds, by faults planted", rows)]


BENCHMARK = Benchmark(
    name="audit",
    title="An audit of a million messages",
    description="Audit an outbox and an inbox with faults planted; what is named has to be what was planted.",
    options={
        "rounds": Option("how often each is measured", 1, 3),
        "messages": Option("that were sent", 1_000_000, 1_000_000),
    },
    tables=tables,
)
