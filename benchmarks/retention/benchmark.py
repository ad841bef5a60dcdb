"""Retention: what forgetting costs, in place and by generations, and what recording costs over generations.

Ids are UUIDs of version 7, as the outbox makes them, unless a key says otherwise.
"""

import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial

from sqlalchemy import Engine, create_engine, event

from benchmarks.shared.database import SCHEMA, SUBSCRIBER
from benchmarks.shared.measurements import Row, Sample, Table, WrongResult
from benchmarks.shared.program import Benchmark, Option, Run
from benchmarks.shared.work import in_processes, ready
from txbox import Inbox
from txbox.maintenance import Maintainer, Retention
from txbox.maintenance.maintainer import BUDGET_MS_PER_SECOND
from txbox.maintenance.rotation import Generations, InboxConversion
from txbox.outbox.message_ids import new_message_id
from txbox.schema import tables as schema_tables

INBOX = f"{SCHEMA}.processed_message"
FORMS = PLAIN, ROTATING = "plain", "rotating"
TURN_SECONDS = 0.5
"""Two inboxes are recorded in by turns."""

OLDER_GENERATIONS = 2
YEAR = timedelta(days=365)
FORGOTTEN_AT_MOST, RECORDED_AT_LEAST, SLOWER_AT_MOST, GROWTH_AT_MOST = 0.05, 0.85, 1.2, 1.1
STATEMENT_MS = 100
WINDOWS, STEPS = 10, 10
BESIDE_TURNS = 5
"""A worker is alone and beside a maintainer by turns."""

BETWEEN_BATCHES_SECONDS = 0.002
"""A worker that is not at its limit: its delays are not those of its own queue."""

WAL = "SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn"
"""The bytes of WAL that were ever written."""

FILL = f"""
INSERT INTO {{schema}}.processed_message (subscriber_id, message_id, processed_at)
SELECT '{SUBSCRIBER}', substr(hex, 1, 8) || '-' || substr(hex, 9, 4) || '-7' || substr(random, 1, 3) || '-8' ||
  substr(random, 4, 3) || '-' || substr(random, 7, 12), at
FROM (
  SELECT at, lpad(to_hex((extract(epoch FROM at) * 1000)::bigint), 12, '0') AS hex, md5(random()::text) AS random
  FROM (
    SELECT timestamptz '{{first}}'
      + (timestamptz '{{end}}' - timestamptz '{{first}}') * (number::float8 / {{rows}}) AS at
    FROM generate_series(0, {{rows}} - 1) AS number
  ) AS timed
) AS hashed"""
"""Rows of some time, in its order."""


class RetentionRun:
    """The measurements of one run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._added: dict[int, int] = {}  # rows that were recorded in the inboxes of so many rows

    @property
    def _rows(self) -> int:
        return int(self._run.options["rows"])

    def forget(self, way: str) -> dict[str, Sample]:
        """Forget a table of old rows, beside a tenth of young ones; return the seconds, and the bytes of WAL.

        Both until the ids are gone, and, of a DELETE and of a generation, until their room is free again.
        """
        database, young = self._run.database, self._rows // 10
        found: dict[str, Sample] = {}
        now = datetime.now(UTC)
        with self._in_form(ROTATING if way == DETACHED else PLAIN) as engine:
            self._fill(self._rows, now - 2 * YEAR, now - YEAR)
            generations = Generations(engine, schema=SCHEMA)
            if way == DETACHED:
                generations.rotate()
                database.execute(
                    f"UPDATE {SCHEMA}.inbox_generation SET closed_at = now() - interval '1 year' "
                    "WHERE closed_at IS NOT NULL"
                )
            self._fill(young, now - timedelta(days=1), now)
            database.execute(f"VACUUM ANALYZE {INBOX}")
            database.checkpoint()
            before, began = database.number(WAL), time.monotonic()

            def note(until: str) -> None:
                seconds = time.monotonic() - began
                written = (database.number(WAL) - before) / 1e6
                found.update({f"{until}, seconds": Sample(seconds), f"{until}, WAL": Sample(written)})

            if way == DELETED:
                database.execute(f"DELETE FROM {INBOX} WHERE processed_at < now() - interval '180 days'")
                note(DELETED)
                database.execute(f"VACUUM {INBOX}")
                note(VACUUMED)
            elif way == IN_PLACE:
                self._maintainer(engine, timedelta(days=180)).run_once()
                note(IN_PLACE)
            else:

                @event.listens_for(engine, "before_cursor_execute")
                def see(_connection: object, _cursor: object, statement: str, *_: object) -> None:
                    if "DROP TABLE" in statement and not found:
                        note(DETACHED)

                database.execute(
                    f"INSERT INTO {SCHEMA}.inbox_horizon VALUES ('{SUBSCRIBER}', now() - interval '180 days')"
                )
                generations.forget(settled=generations.settle(seconds=60))
                note(DROPPED)
            if (left := database.recorded()) != young:
                raise WrongResult(f"{way}: {left:,} rows are left, not {young:,}")
        return found

    def record(self, rows: int, batch: int, ids: str) -> dict[str, Sample]:
        """Record in two inboxes of so many rows in turns, one of each form; return messages a second of each."""
        if self._added.get(rows, rows) > rows // 10:
            with ThreadPoolExecutor() as pool:
                list(pool.map(partial(self._make_inbox, rows), FORMS))
            self._added[rows] = 0
        self._run.database.checkpoint()
        schemas = [schema_of(form, rows) for form in FORMS]
        before = [self._run.database.number(f"SELECT count(*) FROM {schema}.processed_message") for schema in schemas]
        found = in_processes(1, record_in_turns, self._run.url, schemas, self._run.options["seconds"], batch, ids)[0]
        for schema, was, (done, _) in zip(schemas, before, found, strict=True):
            if (now := self._run.database.number(f"SELECT count(*) FROM {schema}.processed_message")) != was + done:
                raise WrongResult(f"{schema}: {now:,} rows, not {was:,} and {done:,}")
        self._added[rows] += max(done for done, _ in found)
        return {
            key_of(form, rows, batch, ids): Sample(done / seconds)
            for form, (done, seconds) in zip(FORMS, found, strict=True)
        }

    def _make_inbox(self, rows: int, form: str) -> None:
        """Make an inbox of this form anew, with ids of a year; the rotating one has them in equal generations."""
        schema, now = schema_of(form, rows), datetime.now(UTC)
        engine = create_engine(self._run.url, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            drop = f"DROP SCHEMA IF EXISTS {schema} CASCADE"
            connection.exec_driver_sql(drop)
            connection.exec_driver_sql(f"CREATE SCHEMA {schema}")
            if rows not in self._added:
                self._run.stack.callback(self._run.database.execute, drop)
            schema_tables(schema).metadata.create_all(connection)
            if form == ROTATING:
                InboxConversion(engine, schema=schema).forward()
            parts = OLDER_GENERATIONS + 1 if form == ROTATING else 1
            for part in range(parts):
                if part:
                    Generations(engine, schema=schema).rotate()
                first, end = (now - YEAR * (parts - number) / parts for number in (part, part + 1))
                connection.exec_driver_sql(fill(schema, rows // parts, first, end))
            connection.exec_driver_sql(f"VACUUM ANALYZE {schema}.processed_message")
        engine.dispose()

    def beside(self) -> dict[str, Sample]:
        """Record batches alone and beside a maintainer, by turns; return the slowest hundredth, in milliseconds."""
        now, options = datetime.now(UTC), self._run.options
        with self._in_form(PLAIN) as engine:
            self._fill(self._rows, now - 2 * YEAR, now - YEAR)
            self._run.database.execute(f"VACUUM ANALYZE {INBOX}")
            self._run.database.checkpoint()
            alone: list[float] = []
            beside: list[float] = []
            longest, begun = [0.0], [0.0]

            @event.listens_for(engine, "before_cursor_execute")
            def begin(*_: object) -> None:
                begun[0] = time.monotonic()

            @event.listens_for(engine, "after_cursor_execute")
            def end(*_: object) -> None:
                longest[0] = max(longest[0], time.monotonic() - begun[0])

            for _ in range(BESIDE_TURNS):
                alone += in_processes(1, record_slowly, self._run.url, options["seconds"] / BESIDE_TURNS)[0]
                maintainer = self._maintainer(engine, timedelta(days=180), BUDGET_MS_PER_SECOND)
                maintainer.start()
                try:
                    beside += in_processes(1, record_slowly, self._run.url, options["seconds"] / BESIDE_TURNS)[0]
                finally:
                    maintainer.stop()
            left = self._run.database.number(
                f"SELECT count(*) FROM {INBOX} WHERE processed_at < now() - interval '180 days'"
            )
            if not 0 < left < self._rows:
                raise WrongResult(
                    f"of {self._rows:,} rows, {left:,} are left: the maintainer did not work all the time"
                )
        return {ALONE: slowest(alone), BESIDE: slowest(beside), LONGEST: Sample(longest[0] * 1e3)}

    def growth(self) -> dict[str, Sample]:
        """Record at a constant rate for ten windows; return the megabytes of table and key, after the second and most.

        Time is made: each step's rows are older than now, and the window reaches from now to where it would begin.
        """
        database, rows = self._run.database, self._rows // 10
        window, now = timedelta(days=30), datetime.now(UTC)
        step, start = window / STEPS, now - window * (WINDOWS + 2)
        sizes = []
        with self._in_form(PLAIN) as engine:
            for number in range(WINDOWS * STEPS):
                first = start + step * number
                self._fill(rows // STEPS, first, first + step)
                self._maintainer(engine, datetime.now(UTC) - (first + step - window)).run_once()
                database.execute(f"VACUUM {INBOX}")
                sizes.append(database.number(f"SELECT pg_total_relation_size('{INBOX}')") / 1e6)
        return {SETTLED: Sample(sizes[2 * STEPS - 1]), GROWN: Sample(max(sizes[2 * STEPS :]))}

    def _maintainer(self, engine: Engine, window: timedelta, budget_ms_per_second: float = 1_000) -> Maintainer:
        return Maintainer(
            engine,
            Retention(inbox={SUBSCRIBER: window}),
            schema=SCHEMA,
            budget_ms_per_second=budget_ms_per_second,
            interval_seconds=0.1,
        )

    def _fill(self, rows: int, first: datetime, end: datetime) -> None:
        self._run.database.execute(fill(SCHEMA, rows, first, end))

    @contextmanager
    def _in_form(self, form: str) -> Iterator[Engine]:
        """Give an empty inbox of this form; it is one table again afterwards."""
        database, engine = self._run.database, create_engine(self._run.url)
        database.reset(others=("inbox_horizon", "maintenance"))
        conversion = InboxConversion(engine, schema=SCHEMA)
        if form == ROTATING:
            conversion.forward()
        try:
            yield engine
        finally:
            database.execute(f"TRUNCATE {INBOX}")
            conversion.back()
            engine.dispose()


def fill(schema: str, rows: int, first: datetime, end: datetime) -> str:
    """Return the statement that adds rows of some time."""
    return FILL.format(schema=schema, rows=rows, first=first.isoformat(), end=end.isoformat())


def schema_of(form: str, rows: int) -> str:
    """Name the schema of an inbox that is recorded in."""
    return f"{SCHEMA}_{form}_{rows}"


def key_of(form: str, rows: int, batch: int, ids: str) -> str:
    """Name a measurement of recording."""
    return f"{form}, {rows / 1e6:g} M, {ids}, {batch} at once"


def record_in_turns(
    _number: int, url: str, schemas: Sequence[str], seconds: float, batch: int, ids: str
) -> list[tuple[int, float]]:
    """Record new messages in each schema, a batch in each transaction; return how many, and the seconds, of each.

    The turns are short, so that whatever slows the machine down slows each schema down.
    """
    make = new_message_id if ids == "v7" else lambda: str(uuid.uuid4())
    done, passed = [0] * len(schemas), [0.0] * len(schemas)
    with ExitStack() as stack:
        engine = create_engine(url)
        inboxes = [Inbox(SUBSCRIBER, schema=schema) for schema in schemas]
        connections = [stack.enter_context(engine.connect()) for _ in schemas]
        ready()
        while min(passed) < seconds:
            for number, (inbox, connection) in enumerate(zip(inboxes, connections, strict=True)):
                began = time.monotonic()
                while (turn := time.monotonic() - began) < TURN_SECONDS:
                    if batch == 1:
                        done[number] += inbox.record(connection, make())
                    else:
                        done[number] += len(inbox.record_many(connection, [make() for _ in range(batch)]))
                    connection.commit()
                passed[number] += turn
    return list(zip(done, passed, strict=True))


def record_slowly(_number: int, url: str, seconds: float) -> list[float]:
    """Record a batch of ten every few milliseconds; return how long each took, in milliseconds."""
    inbox, taken = Inbox(SUBSCRIBER, schema=SCHEMA), []
    with create_engine(url).connect() as connection:
        ready()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            began = time.monotonic()
            inbox.record_many(connection, [new_message_id() for _ in range(10)])
            connection.commit()
            taken.append((time.monotonic() - began) * 1e3)
            time.sleep(BETWEEN_BATCHES_SECONDS)
    return taken


def slowest(taken: Sequence[float]) -> Sample:
    """Return the slowest hundredth, with the median beside it."""
    ordered = sorted(taken)
    return Sample(ordered[len(ordered) * 99 // 100], {"median": ordered[len(ordered) // 2]})


DELETED, VACUUMED, IN_PLACE = "DELETE", "DELETE and VACUUM", "in place"
DETACHED, DROPPED = "a generation taken out", "a generation dropped"
ALONE, BESIDE, LONGEST = "p99 alone", "p99 beside a maintainer", "its longest statement"
SETTLED, GROWN = "size after two windows", "largest size in ten"


def tables(run: Run) -> list[Table]:
    """Forgetting, what it does to workers, recording over generations, growth."""
    this = RetentionRun(run)
    ways = {
        what: [
            Row(
                f"{until}, {what}",
                partial(this.forget, until) if what == "seconds" and until in (DELETED, IN_PLACE, DETACHED) else None,
                limit and f"{limit}, {what}",
                at_most=at_most,
                unit=unit,
                ours=limit is not None,
            )
            for until, limit, at_most in (
                (DELETED, None, None),
                (VACUUMED, None, None),
                (IN_PLACE, DELETED, None),
                (DETACHED, DELETED, FORGOTTEN_AT_MOST),
                (DROPPED, VACUUMED, None),  # as long as the file system takes to remove so many bytes
            )
        ]
        for what, unit in (("seconds", "s"), ("WAL", "MB"))
    }
    recording: list[Row] = []
    for rows in run.options["inbox_rows"]:
        for ids, batch in (("v7", 1), ("v7", 10), ("v7", 100), ("v4", 100)):
            plain, rotating = (key_of(form, rows, batch, ids) for form in FORMS)
            recording.append(Row(plain, partial(this.record, rows, batch, ids)))
            recording.append(Row(rotating, None, plain, RECORDED_AT_LEAST, ours=True))
    return [
        Table("until old rows are forgotten", ways["seconds"]),
        Table("what that writes", ways["WAL"]),
        Table(
            "a worker beside it",
            [
                Row(ALONE, this.beside, unit="ms"),
                Row(BESIDE, None, ALONE, at_most=SLOWER_AT_MOST, unit="ms", ours=True),
                Row(LONGEST, None, at_most=STATEMENT_MS, unit="ms", ours=True),
            ],
            plotted=False,
        ),
        Table("recording", recording),
        Table(
            "growth",
            [
                Row(SETTLED, this.growth, unit="MB"),
                Row(GROWN, None, SETTLED, at_most=GROWTH_AT_MOST, unit="MB", ours=True),
            ],
            plotted=False,
        ),
    ]


BENCHMARK = Benchmark(
    name="retention",
    title="What forgetting costs",
    description="Measure what forgetting old ids costs, in place and by generations, and recording over generations.",
    options={
        "rounds": Option("how often each is measured", 1, 2),
        "rows": Option("old rows to be forgotten", 1_000_000, 10_000_000),
        "inbox_rows": Option("rows of the inbox that is recorded in", (1_000_000,), (1_000_000, 50_000_000)),
        "seconds": Option("of each measurement of recording", 10.0, 15.0),
    },
    tables=tables,
    settings={"max_wal_size": "8GB"},
)
