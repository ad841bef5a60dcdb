"""The tables of docs/hosts.md, and what a cell has to show."""

from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import create_engine

from integration.hosts.roads import IDS, ROADS, Unusable
from integration.hosts.shapes import HOSTS, Place, Server
from support.workers.business import Business, once
from txbox import TxboxError

PAGE = (Path(__file__).parents[3] / "docs" / "hosts.md").read_text()


def table(heading: str) -> list[list[str]]:
    """The cells of a section's table, without its head's rule."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if not line.startswith("| -")]


def some(cell: str) -> set[str]:
    """Return the roads of a cell: ``everything``, ``everything but A, B``, ``A, B`` or ``nothing``."""
    if cell.startswith("everything"):
        return EVERYTHING - some(cell.removeprefix("everything").removeprefix(" but ") or "nothing")
    found = set() if cell == "nothing" else set(cell.split(", "))
    assert found <= EVERYTHING, cell
    return found


EVERYTHING = {*ROADS, "Bulk load"}
_, *WORKING = table("What works")
_, *REFUSING = table("What is refused")
ROWS = [(host, some(exact), some("nothing"), "") for hosts, exact in WORKING for host in hosts.split("<br>")] + [
    (host, some(exact), some(refused), lines)
    for hosts, refused, exact, lines in REFUSING
    for host in hosts.split("<br>")
]
CELLS = {
    (host, road): "exact" if road in exact else "refused" if road in refused else "none"
    for host, exact, refused, _ in ROWS
    for road in (*ROADS, "Bulk load")
}
LINES = {host: [line.strip("`") for line in lines.split("<br>")] for host, _, _, lines in ROWS}


def check_cell(
    server: Server, host: str, road: str, apply: Callable[[Place], None], caplog: pytest.LogCaptureFixture
) -> None:
    """See that a host is served exactly, or refused in one line of the page, as its cell says."""
    told = ""
    with HOSTS[host].database(server) as place:
        try:
            apply(place)
        except (TxboxError, Unusable) as error:
            told = str(error) or next(line for line in caplog.messages if "cannot use the database" in line)
        if place.truth is not None and road not in ("Relay", "Dashboard"):
            truth = create_engine(place.truth)
            found = Business(truth)
            assert found.applied() == (once(()) if told else once(IDS))
            assert {id_.replace("a", "ä") for id_ in found.recorded()} == (set() if told else set(IDS))
            assert found.letters() == {}
            truth.dispose()
    if CELLS[host, road] == "exact":
        assert told == ""
    else:
        assert any(line in told for line in LINES[host]), told
        assert "\n" not in told
