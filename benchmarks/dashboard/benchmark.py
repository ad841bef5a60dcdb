"""The dashboard's benchmark: how long the database takes for each page, where there is much of everything.

The pages say it themselves, in ``Server-Timing``: from the begin of each transaction to its end, as the dashboard sees
it. Each page is asked for several times; the first answers, which read from the disk, do not count.
"""

import re
import statistics
from functools import partial

from sqlalchemy import create_engine
from starlette.testclient import TestClient

from benchmarks.shared.database import SCHEMA
from benchmarks.shared.measurements import Row, Sample, Table, WrongResult
from benchmarks.shared.program import Benchmark, Option, Run
from txbox_dashboard import dashboard

PAGE_MILLISECONDS = 100
WARM_UPS = 2
"""Answers that may read from the disk, and leave out what is not read in time."""

SUBSCRIBERS = 20
OPERATION_LETTERS = 200_000

# Ids as random as they come (md5), in the order in which they come: the inbox's key is read from all over the disk.
FILL = f"""
TRUNCATE {SCHEMA}.dead_letter, {SCHEMA}.message_failure, {SCHEMA}.message_lease, {SCHEMA}.outbox_message,
  {SCHEMA}.reported_activity, {SCHEMA}.worker_report, {SCHEMA}.bulk_load, {SCHEMA}.bulk_load_chunk,
  {SCHEMA}.dead_letter_operation, {SCHEMA}.dead_letter_selection;
INSERT INTO {SCHEMA}.dead_letter (
  subscriber_id, message_id, reason, error, attempts, source, body, body_hash, headers, envelope
)
SELECT 's' || CASE WHEN n % 10 < 8 THEN 0 ELSE n % {SUBSCRIBERS} END, 'letter-' || n,
  (ARRAY['failed', 'mismatch', 'crashed'])[n % 3 + 1], 'ValueError: customer ' || n || ' has no account', 5,
  'https://queue.example/1/purchases', convert_to(repeat('x', 300), 'UTF8'), sha256(n::text::bytea),
  '{{{{"tenant": "north"}}}}', '{{{{}}}}'
FROM generate_series(1, {{letters}}) AS n;
INSERT INTO {SCHEMA}.message_failure (subscriber_id, message_id, attempts, error)
SELECT 's' || n % {SUBSCRIBERS}, 'failing-' || n, 1, 'ValueError: no' FROM generate_series(1, 100000) AS n;
INSERT INTO {SCHEMA}.message_lease (
  subscriber_id, message_id, fence, attempts, owner, acquired_at, expires_at, completed_at
)
SELECT 's1', 'lease-' || n, n, 1, 'host 1', now(), CASE WHEN n % 1000 = 0 THEN now() + interval '1 hour' END,
  CASE WHEN n % 1000 <> 0 THEN now() END FROM generate_series(1, 1000000) AS n;
INSERT INTO {SCHEMA}.outbox_message (lane, message_id, destination, headers, body)
SELECT n % 5 * 64 + n % 64, 'outgoing-' || n, 'own:' || n % 5, '{{{{}}}}', '' FROM generate_series(1, 1000000) AS n;
INSERT INTO {SCHEMA}.reported_activity (kind, name, minute, figure, count)
SELECT kind, 's' || n, date_trunc('minute', now()) - ago * interval '1 minute', figure, ago
FROM unnest(ARRAY['subscriber', 'destination']) AS kind, generate_series(0, {SUBSCRIBERS} - 1) AS n,
  generate_series(0, 10079) AS ago, unnest(ARRAY['processed', 'duplicate', 'failed']) AS figure;
INSERT INTO {SCHEMA}.worker_report (worker_id, subscriber_id, source, host, pid, version, state)
SELECT 'w' || n, 's' || n % {SUBSCRIBERS}, 'queue', 'host', n, '1', 'working' FROM generate_series(1, 200) AS n;
INSERT INTO {SCHEMA}.bulk_load (run_id, subscriber_id, source, digest, writer, chunks, bounds)
SELECT lpad(to_hex(n), 12, '0'), 's1', 'events', '', 'copy', 2000, '[]' FROM generate_series(1, 50) AS n;
INSERT INTO {SCHEMA}.bulk_load_chunk (run_id, chunk, rows_read, applied)
SELECT lpad(to_hex(n), 12, '0'), chunk, 1000, 900 FROM generate_series(1, 50) AS n, generate_series(0, 1999) AS chunk;
INSERT INTO {SCHEMA}.dead_letter_operation (kind, filter, requested_by)
SELECT 'redrive', '{{{{}}}}', 'anna' FROM generate_series(1, 20);
INSERT INTO {SCHEMA}.dead_letter_selection (operation_id, dead_letter_id, outcome)
SELECT operation_id, n, 'redriven'
FROM {SCHEMA}.dead_letter_operation, generate_series(1, {OPERATION_LETTERS} / 20) AS n;
TRUNCATE {SCHEMA}.processed_message
"""

INBOX = f"""
INSERT INTO {SCHEMA}.processed_message (subscriber_id, message_id)
SELECT 's' || n % {SUBSCRIBERS}, lpad(to_hex(n), 16, '0') || md5(n::text) FROM generate_series({{first}}, {{last}}) AS n
"""
STEP = 5_000_000

PAGES = {
    "overview": "/",
    "subscriber": "/subscriber?id=s0&hours=24+h",
    "message, known": "/message?id={known}",
    "message, unknown": "/message?id=none",
    "letters, all": "/letters",
    "letters of a large subscriber": "/letters?subscriber=s0",
    "letters, by an error that one has": "/letters?error=customer+7+has",
    "letters, by an error that none has": "/letters?error=none-such",
    "letter": "/letter?number=1000",
    "confirm, all letters": "/letters/confirm?action=redrive",
    "outbox": "/outbox",
    "leases": "/leases",
    "loads": "/loads",
    "maintenance": "/maintenance",
}


class Pages:
    """A dashboard of tables that are filled when the first page is asked for."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._client: TestClient | None = None
        self._known = ""

    def measured(self, path: str) -> Sample:
        """Return the milliseconds of database time of a page, the median of several; the first one is a detail."""
        if self._client is None:
            self._client = self._filled()
        times = []
        for number in range(self._run.options["requests"] + WARM_UPS):
            answer = self._client.get(path.format(known=self._known))
            left_out = re.findall("<li>(.*?: not read in time)</li>", answer.text)
            if answer.status_code != 200 or (left_out and number >= WARM_UPS):
                raise WrongResult(f"{path}: {answer.status_code}, {left_out}")
            times.append(float(answer.headers["server-timing"].partition("dur=")[2]))
        return Sample(statistics.median(times[WARM_UPS:]), {"first": times[0], "most": max(times[WARM_UPS:])})

    def _filled(self) -> TestClient:
        database, options = self._run.database, self._run.options
        database.execute(FILL.format(letters=options["letters"]))
        for first in range(1, options["inbox"] + 1, STEP):
            database.execute(INBOX.format(first=first, last=min(first + STEP - 1, options["inbox"])))
        database.execute("VACUUM ANALYZE")
        database.checkpoint()
        engine = create_engine(self._run.url)
        with engine.connect() as connection:
            self._known = connection.exec_driver_sql(
                f"SELECT message_id FROM {SCHEMA}.processed_message LIMIT 1"
            ).scalar_one()
        return TestClient(dashboard(engine, schema=SCHEMA))


def tables(run: Run) -> list[Table]:
    """One row for each page; the tables are filled when the first is measured."""
    pages = Pages(run)
    rows = [
        Row(name, partial(pages.measured, path), at_most=PAGE_MILLISECONDS, unit="ms", ours=True)
        for name, path in PAGES.items()
    ]
    return [Table("milliseconds of database time, by page", rows)]


BENCHMARK = Benchmark(
    name="dashboard",
    title="Database time of the dashboard's pages",
    description="Ask for each page of a dashboard whose tables are large, and read from its answer what it took.",
    options={
        "rounds": Option("how often each is measured", 1, 3),
        "inbox": Option("ids in the inbox", 5_000_000, 50_000_000),
        "letters": Option("dead letters that wait", 1_000_000, 1_000_000),
        "requests": Option("of each page in a round that count", 5, 10),
    },
    tables=tables,
)
