"""``python -m benchmarks SUBJECT``: run one benchmark; ``figures`` draws the plots of the documentation again."""

import sys
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path

from benchmarks.shared.measurements import Figures
from benchmarks.shared.plot import draw
from benchmarks.shared.program import Benchmark, Run, run

SUBJECTS = (
    "consumer",
    "outbox_worker",
    "broker",
    "coroutines",
    "record",
    "relay",
    "ledger",
    "deadlocks",
    "bulk_load",
    "bulk_load_size",
    "spark_write",
    "audit",
    "retention",
    "dashboard",
    "tracing",
    "memory",
    "peers",
)
FIGURES = Path(__file__).parents[1] / "docs" / "figures"


def main() -> int:
    """Run what the first argument names; return the exit status."""
    name, arguments = (sys.argv[1] if len(sys.argv) > 1 else ""), sys.argv[2:]
    if name == "figures":
        _draw(Path(arguments[0]) if arguments else FIGURES)
        return 0
    if name not in SUBJECTS:
        print(f"usage: python -m benchmarks {{{','.join(SUBJECTS)},figures}} [--help]", file=sys.stderr)
        return 2
    return run(_benchmark(name), arguments)


def _benchmark(name: str) -> Benchmark:
    benchmark: Benchmark = import_module(f"benchmarks.{name}.benchmark").BENCHMARK
    return benchmark


def _draw(folder: Path) -> None:
    """Draw a plot for each result that the documentation holds: ``NAME.json`` there, ``NAME.svg`` in the folder."""
    for path in sorted(FIGURES.glob("*.json")):
        figures = Figures.read(path)
        benchmark = _benchmark(path.stem)
        # What was measured before an option was there has not got it.
        options = {name: option.default for name, option in benchmark.options.items()} | dict(figures.options)
        tables = benchmark.tables(Run(benchmark, options, None, ExitStack()))
        (folder / f"{path.stem}.svg").write_text(draw(benchmark.title, tables, figures))


if __name__ == "__main__":
    sys.exit(main())
