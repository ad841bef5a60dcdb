"""Figures as tables for a person: a row fits in 80 columns."""

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from benchmarks.shared.measurements import Figures, Row, Table


def print_table(console: Console, table: Table, figures: Figures) -> None:
    """Print measurements, each beside its ratio to another one and its target; what was not measured is left out.

    "cpu us" is the client's processor time for a unit, which moves less than the rate does; "server us" the server's.
    """
    columns: dict[str, list[str]] = {table.title: [], "": [], "ratio": [], "low-high": [], "target": []}
    columns |= {"cpu us": [], "server us": []}
    for row in table.rows:
        spread, ratio = row.measured(figures), ("", "")
        if row.key not in figures or (spread is None and row.run is None):
            continue
        if spread is not None and row.to is not None:
            digits = 2 if spread.highest < 10 else 1
            ratio = (f"{spread.median:.{digits}f}x", f"{spread.lowest:.{digits}f}-{spread.highest:.{digits}f}")
        value = f"{number(figures.spread(row.key).median)} {row.unit}"
        times = [figures.detail(row.key, name) for name in ("cpu_us", "server_us")]
        cells = (row.key, value, *ratio, _target(row, figures), *(number(time) if time else "" for time in times))
        for column, cell in zip(columns.values(), cells, strict=True):
            column.append(cell)
    if not columns[table.title]:
        return
    printed = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    used = {heading: column for heading, column in columns.items() if any(column)}
    for heading in used:
        printed.add_column(heading, justify="left" if heading == table.title else "right", no_wrap=True)
    for cells in zip(*used.values(), strict=True):
        printed.add_row(*cells)
    console.print(printed, "")


def number(value: float) -> str:
    """Return a number with as many digits as mean something."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 1 or value == 0 else f"{value:.2g}"


def _target(row: Row, figures: Figures) -> str:
    met = row.is_met(figures)
    if met is None:
        return ""
    bound = f">={row.at_least:g}" if row.at_least is not None else f"<={row.at_most:g}"
    return f"[green]{bound} yes[/]" if met else f"[red]{bound} no[/]"
