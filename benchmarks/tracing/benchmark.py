"""What tracing costs a worker: the same consumer without it, and with OpenTelemetry's SDK.

The worker and its handler are those of the consumer's benchmark; each message came with the context of its creation.
"""

from functools import partial

from benchmarks.shared.measurements import Row, Sample, Table, WrongResult
from benchmarks.shared.program import Benchmark, Option, Run
from benchmarks.shared.work import Rate, in_processes
from benchmarks.tracing.worker import DROPPED, NONE, SAMPLED, consume

SAMPLED_OF_NONE = 0.95
"""A target, as a ratio."""

DESCRIPTION = """\
Workers with one thread, which take their polls in turn; a source in memory, batches of
ten, a handler that is called for each message:

  no tracing      as it is by default
  none sampled    OpenTelemetry's SDK, whose sampler takes no poll
  10 % sampled    the same, with one poll in ten, a BatchSpanProcessor, and an exporter
                  that drops all

After each measurement the records and the balances are checked.
"""


class Turns:
    """Measures all kinds at once, when the first of a round is asked for."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._rates: dict[str, Rate] = {}

    def measured(self, kind: str) -> Sample:
        """Return the rate of a kind; all consume in a process of their own."""
        if kind not in self._rates:
            self._rates = self._measure()
        rate = self._rates.pop(kind)
        return Sample(rate.per_second, {"cpu_us": rate.cpu_us})

    def _measure(self) -> dict[str, Rate]:
        database = self._run.database
        database.reset()
        ((rates, distinct),) = in_processes(1, consume, self._run.url, self._run.options["seconds"])
        if database.recorded() != distinct:
            raise WrongResult(f"{distinct} messages left {database.recorded()} records")
        database.check(distinct, "tracing")
        return rates


def tables(run: Run) -> list[Table]:
    """One table."""
    turns = Turns(run)
    rows = [
        Row(NONE, partial(turns.measured, NONE)),
        Row(DROPPED, partial(turns.measured, DROPPED), NONE, ours=True),
        Row(SAMPLED, partial(turns.measured, SAMPLED), NONE, SAMPLED_OF_NONE, ours=True),
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
