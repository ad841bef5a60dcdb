"""Each cell of the table of docs/hosts.md: a host applies two messages and a duplicate exactly, or is refused."""

import pytest

from integration.hosts.page import CELLS, HEAD, REFUSALS, ROWS, check_cell
from integration.hosts.roads import ROADS
from integration.hosts.shapes import HOSTS, Server


def test_the_page_has_all_hosts_and_roads() -> None:
    assert [row[0] for row in ROWS] == list(HOSTS)
    assert HEAD[1:] == [*ROADS, "Bulk load"]
    assert set(CELLS.values()) == {"exact", "refused", "none"}
    assert {host for host, _ in REFUSALS} == {host for (host, _), cell in CELLS.items() if cell == "refused"}


@pytest.mark.parametrize(
    ("host", "road"), [one for one, cell in CELLS.items() if cell != "none" and one[1] != "Bulk load"]
)
def test_a_host_is_served_exactly_or_refused_in_one_line(
    server: Server, host: str, road: str, caplog: pytest.LogCaptureFixture
) -> None:
    check_cell(server, host, road, lambda place: ROADS[road](HOSTS[host], place), caplog)
