"""``txbox demo --dashboard`` is seen while it runs, and changes nothing of what it counts."""

import socket
from collections.abc import Callable
from urllib.request import urlopen

import pytest

from support.program import txbox
from txbox_demo.checker import Report
from txbox_demo.dashboard_pages import DashboardPages
from txbox_demo.sandbox import Progress

pytestmark = pytest.mark.chaos


def test_the_pages_show_the_run_while_it_goes_on(run_quickly: Callable[..., Report]) -> None:
    urls: list[str] = []
    seen: list[str] = []

    def look(progress: Progress) -> None:
        if progress.billed and not seen:
            (url,) = urls
            with urlopen(url) as answer:
                seen.append(answer.read().decode())

    pages = DashboardPages(socket.create_server(("127.0.0.1", 0)), urls.append)
    report = run_quickly(100, kills=4, seen_by={"on_progress": look, "pages": pages})
    assert report.exact, report.wrong
    assert 'href="/subscriber?id=billing"' in seen[0]
    with pytest.raises(OSError, match="refused"):
        urlopen(urls[0])


def test_a_port_that_is_taken_is_named_before_the_work() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = txbox("demo", "--without-spark", "--dashboard", "--dashboard-port", str(port))
    ended.failed_in_one_line(1, f"port {port}", "--dashboard-port")
