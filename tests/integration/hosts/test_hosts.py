"""Each cell of the table of docs/hosts.md: a host applies two messages and a duplicate exactly, or is refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine

from integration.hosts.roads import IDS, ROADS, Unusable
from integration.hosts.shapes import HOSTS, Server
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


def test_the_page_has_all_hosts_and_roads() -> None:
    assert [row[0] for row in ROWS] == list(HOSTS)
    assert HEAD[1:] == list(ROADS)
    assert set(CELLS.values()) == {"exact", "refused", "none"}
    assert {host for host, _ in REFUSALS} == {host for (host, _), cell in CELLS.items() if cell == "refused"}


@pytest.fixture
def server(
    schema_url: str,
    engine: Engine,
    business: Business,
    make_database: Callable[..., str],
    replicated: Callable[[], tuple[str, str]],
) -> Server:
    return Server(schema_url, engine, make_database, replicated)


@pytest.mark.parametrize(("host", "road"), [one for one, cell in CELLS.items() if cell != "none"])
def test_a_host_is_served_exactly_or_refused_in_one_line(
    server: Server, host: str, road: str, caplog: pytest.LogCaptureFixture
) -> None:
    told = ""
    with HOSTS[host].database(server) as place:
        try:
            ROADS[road](HOSTS[host], place)
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
