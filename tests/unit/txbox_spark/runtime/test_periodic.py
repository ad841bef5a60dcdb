"""What is done beside a bulk load goes on, whatever it raises."""

import threading

from support.waiting import wait_until
from txbox_spark.runtime.periodic import every


def test_what_raises_is_done_again() -> None:
    done: list[str] = []

    def work() -> None:
        done.append(threading.current_thread().name)
        if len(done) == 1:
            raise SystemExit(1)

    with every(0.01, work, name="beside"):
        wait_until(lambda: len(done) >= 3, "it goes on")
    assert set(done) == {"beside"}
