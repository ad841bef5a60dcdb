"""``txbox demo --dashboard`` is seen while it runs, and changes nothing of what it counts."""

import re
import socket
from collections.abc import Callable
from urllib.request import urlopen

import pytest

from support.program import txbox
from txbox_demo.checker import DemoReport
from txbox_demo.page_server import DashboardPages
from txbox_demo.sandbox import Progress

pytestmark = pytest.mark.chaos


def test_the_pages_show_the_run_while_it_goes_on(run_quickly: Callable[..., DemoReport]) -> None:
    urls: list[str] = []
    seen: dict[str, set[str]] = {"subscriber?id=billing": set(), "outbox": set()}
    linked = gone = False

    def look(progress: Progress) -> None:
        nonlocal linked, gone
        if not urls:
            return
        (url,) = urls
        for path, processes in seen.items():
            page = _read(url + path)
            processes.update(re.findall(r"<small>(\d+)</small></th>", page))
            gone |= "gone for" in page
        linked |= bool(progress.billed) and 'href="/subscriber?id=billing"' in _read(url)

    pages = DashboardPages(socket.create_server(("127.0.0.1", 0)), urls.append)
    report = run_quickly(100, kills=8, seen_by={"on_progress": look, "pages": pages})
    assert report.exact, report.wrong
    assert linked
    # Two of each are at work at a time: others have taken the places of those that were killed.
    for role, path in (("billing", "subscriber?id=billing"), ("relay", "outbox")):
        assert report.kills[role], "none was killed"
        assert len(seen[path]) > 2, f"no other {role} came"
    assert gone, "of a relay that is killed the server knows at once"
    with pytest.raises(OSError, match="refused"):
        urlopen(urls[0])


def _read(url: str) -> str:
    with urlopen(url) as answer:
        return str(answer.read().decode())


def test_a_port_that_is_taken_is_named_before_the_work() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = txbox("demo", "--without-spark", "--dashboard", "--dashboard-port", str(port))
    ended.failed_in_one_line(1, f"port {port}", "--dashboard-port")
