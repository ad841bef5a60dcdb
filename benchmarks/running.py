"""What every benchmark's program does: options, choosing measurements, telling of each, a server for the run."""

import argparse
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rounds import Figures, Measurement, Sample, alternate

__all__ = ["add_options", "chosen", "embedded", "kept", "measured", "positive"]


def add_options(parser: argparse.ArgumentParser, name: str, *, rounds: int) -> None:
    """Add the options that all benchmarks have.

    Args:
        parser: to what.
        name: of the benchmark, and of the file that its figures go to.
        rounds: how often each is measured, if nothing is said.
    """
    results = f"benchmarks/results/{name}.json"
    parser.add_argument(
        "--rounds", type=positive(int), default=rounds, help=f"how often each is measured (default: {rounds})"
    )
    parser.add_argument("--only", metavar="REGEX", help="measure only what has a key like this")
    parser.add_argument("--list", action="store_true", help="print the keys, and measure nothing")
    parser.add_argument(
        "--url", help="a database to measure in, as SQLAlchemy writes it (default: one made for the run)"
    )
    parser.add_argument("--pgbench", metavar="PROGRAM", help="default: the embedded Postgres's, or the PATH's")
    parser.add_argument(
        "--json", metavar="FILE", type=Path, default=Path(results), help=f"where every figure goes (default: {results})"
    )


def chosen(plan: Sequence[Measurement], only: str | None) -> list[Measurement]:
    """Return the measurements whose key is like ``only``."""
    return [measurement for measurement in plan if only is None or re.search(only, measurement.key)]


def measured(console: Console, plan: Sequence[Measurement], rounds: int) -> Figures:
    """Measure everything, and print a line for each."""
    done = iter(range(1, len(plan) * rounds + 1))

    def told(number: int, measurement: Measurement, sample: Sample) -> None:
        line = (
            f"[{next(done)}/{len(plan) * rounds}] round {number}: {measurement.key}: {sample.value:,.1f} "
            f"{measurement.unit}"
        )
        console.print(line, markup=False, highlight=False)

    return alternate(plan, rounds, told)


def kept(options: argparse.Namespace) -> dict[str, object]:
    """Return the options that belong to the figures; a URL may hold a password."""
    return {name: value for name, value in vars(options).items() if name not in ("url", "json", "pgbench", "list")}


def embedded(stack: ExitStack, **settings: str) -> str:
    """Start a server for the run; return its URL."""
    from txbox_local import LocalPostgres

    return stack.enter_context(LocalPostgres(settings=settings)).url


def positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    """Return a type of argparse for numbers above 0."""

    def parse(text: str) -> float:
        value = kind(text)
        if value <= 0:
            raise argparse.ArgumentTypeError(f"must be more than 0, not {text}")
        return value

    return parse
