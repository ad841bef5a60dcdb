"""``txbox demo`` leaves nothing behind, whatever ends it."""

import signal
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import psutil
import pytest

from support.program import Running
from support.waiting import wait_until

if TYPE_CHECKING:
    from txbox_local import LocalAws

pytestmark = pytest.mark.chaos

DEMO = ("demo", "--without-spark", "--purchases", "5000")


def forks(demo: psutil.Process) -> list[psutil.Process]:
    """The processes of all roles: children of the fork server."""
    return [
        fork
        for child in demo.children()
        if any("multiprocessing.forkserver" in argument for argument in child.cmdline())
        for fork in child.children()
    ]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_however_it_ends_nothing_keeps_running(on_its_own: None, number: signal.Signals, status: int) -> None:
    with Running(*DEMO, "--dashboard") as running:
        running.says("processing")
        (url,) = [line.removeprefix("see it: ").strip() for line in running.err if line.startswith("see it: ")]
        with urlopen(url) as page:
            assert page.status == 200
        demo = psutil.Process(running.process.pid)
        wait_until(lambda: len(forks(demo)) >= 8, "two processes of each role run")
        processes = demo.children(recursive=True)
        running.signal(number)
        assert running.wait() == status
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert alive == []
    with pytest.raises(OSError, match="refused"):
        urlopen(url)
    if status > 0:
        assert running.err[-1] == "txbox: interrupted\n"


def test_an_interrupt_leaves_a_database_and_queues_of_ones_own_clean(
    database_url: str, aws: "LocalAws", left: Callable[[], Any]
) -> None:
    before = left()
    with TemporaryDirectory() as directory:  # short enough for sockets, which tmp_path is not everywhere
        with Running(*DEMO, "--url", database_url, env={"TMPDIR": directory}) as running:
            running.says("processing")
            assert (len(left().schemas), len(left().queues)) == (len(before.schemas) + 1, len(before.queues) + 2)
            assert any(Path(directory).iterdir())
            running.signal(signal.SIGINT)
            assert running.wait() == 130
        assert left() == before
        assert not any(Path(directory).iterdir())
