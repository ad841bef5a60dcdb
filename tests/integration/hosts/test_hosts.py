"""Each host and road of docs/hosts.md: a host applies two messages and a duplicate exactly, or is refused."""

import pytest

from integration.hosts.page import CELLS, EVERYTHING, ROWS, check_cell
from integration.hosts.roads import ROADS
from integration.hosts.shapes import HOSTS, Host, Server, no_options


def test_the_page_has_all_hosts_and_roads() -> None:
    assert sorted(host for host, *_ in ROWS) == sorted(HOSTS)
    for host, exact, refused, lines in ROWS:
        assert exact.isdisjoint(refused), host
        assert bool(refused) == bool(lines), host
        assert EVERYTHING - exact - refused == takes_no_such_thing(HOSTS[host]), host


def takes_no_such_thing(host: Host) -> set[str]:
    """Return the roads to which a host cannot give its sessions, its engine or its loaders."""
    if host.sessions is not no_options:
        return {"Celery", "Django", "Dashboard", "Bulk load"}
    return {"Bulk load"} if host.options or host.loaders else set()


@pytest.mark.parametrize(
    ("host", "road"), [one for one, cell in CELLS.items() if cell != "none" and one[1] != "Bulk load"]
)
def test_a_host_is_served_exactly_or_refused_in_one_line(
    server: Server, host: str, road: str, caplog: pytest.LogCaptureFixture
) -> None:
    check_cell(server, host, road, lambda place: ROADS[road](HOSTS[host], place), caplog)
