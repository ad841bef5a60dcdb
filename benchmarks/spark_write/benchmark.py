"""The benchmark of what people write by hand: df.write.jdbc, alone and with a merge, beside the bulk load."""

from functools import partial

import psycopg
from sqlalchemy import make_url

from benchmarks.bulk_load.benchmark import COLUMNS, NAIVE_MERGE, Loading
from benchmarks.shared.database import SCHEMA, conninfo
from benchmarks.shared.measurements import Row, Sample, Table, WrongResult
from benchmarks.shared.program import Benchmark, Option, Run
from txbox_spark.runtime.jdbc import jdbc_options

WRITE = "df.write.jdbc"
BY_HAND = "df.write.jdbc + merge"
OURS = {"copy": "bulk_load, writer copy", "jdbc": "bulk_load, writer jdbc"}

DESCRIPTION = """\
Bring a DataFrame into Postgres, with Spark's writer at its fastest: unlogged table, 10,000
rows in a batch, statements rewritten to many rows. Alone, which applies nothing and doubles
what is run twice. Then followed by INSERT … SELECT … ON CONFLICT DO NOTHING into the inbox
and the effect, in one transaction. And bulk_load. A fifth of the ids are in the inbox, a
tenth of the rows repeat another one. Rows a second; Spark's start is not counted. After a
merge the accounts must add up.
"""


class Writing(Loading):
    """The ways to write, with the events and the Spark of the bulk load's benchmark."""

    def by_hand(self, key: str, merge: str) -> Sample:
        """Spark fills a staging table; then a transaction merges it, if there is something to merge."""
        frame, database = self.frame, self.run.database
        table = f"{SCHEMA}.staging"

        def write() -> None:
            database.execute(f"CREATE UNLOGGED TABLE {table} ({COLUMNS})")
            options = {"reWriteBatchedInserts": "true", "batchsize": "10000", "dbtable": table}
            frame.write.format("jdbc").options(**jdbc_options(make_url(self.run.url)), **options).mode("append").save()
            if merge:
                settings = f"SET LOCAL work_mem = '128MB'; SET LOCAL search_path = {SCHEMA}"
                database.execute(f"BEGIN; {settings}; {merge} COMMIT")

        sample = self._measured(key, write, is_merged=bool(merge))
        with psycopg.connect(conninfo(self.run.url)) as connection:
            (written,) = connection.execute(f"SELECT count(*) FROM {table}".encode()).fetchone() or (0,)
        if written != self.events.rows:
            raise WrongResult(f"{key}: {written:,} of {self.events.rows:,} rows were written")
        return sample


def tables(run: Run) -> list[Table]:
    """Ours against what is written by hand."""
    this = Writing(run)
    rows = [Row(WRITE, partial(this.by_hand, WRITE, "")), Row(BY_HAND, partial(this.by_hand, BY_HAND, NAIVE_MERGE))]
    rows += [Row(key, partial(this.by_spark, key, writer), BY_HAND, ours=True) for writer, key in OURS.items()]
    ratios = [Row(key, None, WRITE, ours=True) for key in OURS.values()]
    return [
        Table(f"a DataFrame of {run.options['rows']:,} rows", rows),
        Table("against writing alone", ratios, plotted=False),
    ]


BENCHMARK = Benchmark(
    name="spark_write",
    title="Rows a second from Spark into Postgres",
    description=DESCRIPTION,
    options={"rounds": Option("how often each is measured", 5, 5), "rows": Option("of the events", 300_000, 1_000_000)},
    tables=tables,
    settings={"shared_buffers": "2GB", "max_wal_size": "8GB", "checkpoint_timeout": "15min"},
)
