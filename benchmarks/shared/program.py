"""What every benchmark's program does: options, choosing measurements, a server for the run, the report."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from benchmarks.shared.database import Database
from benchmarks.shared.measurements import Figures, Table, WrongResult, measure
from benchmarks.shared.pgbench import PgbenchFailed, PgbenchRun, run_pgbench
from benchmarks.shared.plot import draw
from benchmarks.shared.report import print_table
from txbox_local import LocalPostgres
from txbox_local.postgres.local_postgres import bin_directory


class Option(NamedTuple):
    """A number, or several, that the command line may set: its values in the default run and in the full one."""

    meaning: str
    default: Any
    full: Any


@dataclass(frozen=True)
class Benchmark:
    """A subject.

    Attributes:
        name: of its folder.
        title: above the plot.
        description: for ``--help``.
        options: by name; ``rounds`` is among them.
        tables: what a run measures in a round, in this order, shows and aims at; starts nothing.
        settings: of the server that is started for the run.
    """

    name: str
    title: str
    description: str
    options: Mapping[str, Option]
    tables: Callable[["Run"], Sequence[Table]]
    settings: Mapping[str, str] = field(default_factory=lambda: {"max_wal_size": "4GB"})


@dataclass(frozen=True)
class Run:
    """One run of a benchmark; a server is started when it is first asked for.

    Attributes:
        options: their values, by name.
        stack: ends with the run.
        notes: what the result keeps of each row beside its samples, by key.
    """

    benchmark: Benchmark
    options: Mapping[str, Any]
    given_url: str | None
    stack: ExitStack
    notes: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def url(self) -> str:
        """The database, as SQLAlchemy writes it."""
        return self.given_url or self.stack.enter_context(LocalPostgres(settings=self.benchmark.settings)).url

    @cached_property
    def database(self) -> Database:
        """The accounts, and the tables of txbox beside them."""
        return self.stack.enter_context(Database(self.url))

    @staticmethod
    def program(name: str) -> str:
        """Return a program of the embedded Postgres."""
        return str(bin_directory() / name)

    def pgbench(self, script: str, connections: int, variables: Mapping[str, str | int]) -> PgbenchRun:
        """Run a script by pgbench for as many seconds as the options say."""
        program, seconds = self.program("pgbench"), self.options["seconds"]
        return run_pgbench(program, self.url, script, connections, seconds, variables)


def run(benchmark: Benchmark, arguments: Sequence[str]) -> int:
    """Measure and report; return the exit status."""
    parser = _parser(benchmark)
    given = parser.parse_args(arguments)
    values = {
        name: next(value for value in (getattr(given, name), option.full if given.full else option.default) if value)
        for name, option in benchmark.options.items()
    }
    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    figures = Figures({"full": given.full, "only": given.only, **values})
    with ExitStack() as stack:
        this = Run(benchmark, values, given.url, stack)
        tables = benchmark.tables(this)
        if given.list:
            print("\n".join(row.key for table in tables for row in table.rows if row.run))
            return 0
        try:
            measure(tables, given.only, values["rounds"], figures, lambda line: console.print(line, markup=False))
        except (PgbenchFailed, WrongResult) as error:
            errors.print(str(error), markup=False)
            return 1
        if not figures.samples:
            errors.print(f"no measurement has a key like {given.only!r}; see --list", markup=False)
            return 2
        figures.origin["server"] = this.database.description()
        figures.origin |= {"notes": this.notes} if this.notes else {}
    for table in tables:
        print_table(console, table, figures)
    figures.write(given.json, tables)
    given.json.with_suffix(".svg").write_text(draw(benchmark.title, tables, figures))
    console.print(f"every figure is in {given.json}, the plot beside it", markup=False, soft_wrap=True)
    missed = any(row.is_met(figures) is False for table in tables for row in table.rows)
    return 1 if missed and given.strict else 0


def _parser(benchmark: Benchmark) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {benchmark.name}",
        description=benchmark.description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--full", action="store_true", help="more rounds, sizes and variants: the second of the defaults below")
    for name, option in benchmark.options.items():
        default, full = (str(value).strip("()").replace(" ", "") for value in (option.default, option.full))
        kind = _numbers if isinstance(option.default, tuple) else type(option.default)
        add("--" + name.replace("_", "-"), type=kind, help=f"{option.meaning} (default: {default} / {full})")
    results = f"benchmarks/results/{benchmark.name}.json"
    add("--only", metavar="REGEX", default="", help="measure only what has a key like this")
    add("--list", action="store_true", help="print the keys, and measure nothing")
    add("--strict", action="store_true", help="exit with 1 if a target is not met")
    add("--url", help="a database to measure in, as SQLAlchemy writes it (default: one made for the run)")
    add("--json", metavar="FILE", type=Path, default=Path(results), help=f"for the figures (default: {results})")
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))
