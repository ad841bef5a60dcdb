"""The tables of docs/hosts.md, and what a cell has to show."""

from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import create_engine

from integration.hosts.roads import IDS, Unusable
from integration.hosts.shapes import HOSTS, Place, Server
from support.workers.business import Business, once
from txbox import TxboxError

PAGE = (Path(__file__).parents[3] / "docs" / "hosts.md").read_text()


def table(heading: str) -> list[list[str]]:
    """The cells of a section's table, without its head's rule."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if not line.startswith("| -")]


HEAD, *ROWS = table("What was tried")
CELLS = {(row[0], road): cell for row in ROWS for road, cell in zip(HEAD[1:], row[1:], strict=True)}
_, *REFUSALS = table("What is refused")


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
        lines = [line.strip("`") for refused, line in REFUSALS if refused == host]
        assert any(line in told for line in lines), told
        assert "\n" not in told
