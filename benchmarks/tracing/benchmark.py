"""What tracing costs a worker: the same consumer without it, and with OpenTelemetry's SDK.

The worker and its handler are those of the consumer's benchmark; each message came with the context of its creation.
"""

from functools import partial

from benchmarks.shared.measurements import Row, Sample, Table, WrongResult
from benchmarks.shared.program import Benchmark, Option, Run
from benchmarks.shared.work import in_processes
from benchmarks.tracing.worker import DROPPED, NONE, SAMPLED, consume

SAMPLED_OF_NONE = 0.95
"""A target, as a ratio."""

DESCRIPTION = """\
A worker with one thread, its source in memory, batches of ten, a handler that is called
for each message:

  no tracing      as it is by default
  none sampled    OpenTelemetry's SDK, whose sampler takes no poll
  10 % sampled    the same, with one poll in ten, a BatchSpanProcessor, and an exporter
                  that drops all

After each measurement the records and the balances are checked.
"""


def measure(run: Run, kind: str) -> Sample:
    """Consume in a process of its own."""
    database = run.database
    database.reset()
    ((rate, distinct),) = in_processes(1, consume, kind, run.url, run.options["seconds"])
    if database.recorded() != distinct:
        raise WrongResult(f"{kind}: {distinct} messages left {database.recorded()} records")
    database.check(distinct, kind)
    return Sample(rate.per_second, {"cpu_us": rate.cpu_us})


def tables(run: Run) -> list[Table]:
    """One table."""
    rows = [
        Row(NONE, partial(measure, run, NONE)),
        Row(DROPPED, partial(measure, run, DROPPED), NONE, ours=True),
        Row(SAMPLED, partial(measure, run, SAMPLED), NONE, SAMPLED_OF_NONE, ours=True),
    ]
    return [Table("batches of ten", rows)]


BENCHMARK = Benchmark(
    name="tracing",
    title="Messages consumed a second, with tracing and without",
    description=DESCRIPTION,
    options={
        "rounds": Option("how often each is measured", 5, 15),
        "seconds": Option("of each measurement", 2.0, 5.0),
    },
    tables=tables,
)
