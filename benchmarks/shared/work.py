"""Running work side by side: in processes of their own, and in threads that a window of time is measured of."""

import gc
import multiprocessing
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import AbstractContextManager
from multiprocessing.synchronize import Barrier
from typing import Any, NamedTuple, TypeVar

Result = TypeVar("Result")

WARM_UP_SECONDS = 0.4
START_SECONDS = 120.0

_barriers: list[Barrier] = []


class Rate(NamedTuple):
    """What was done.

    Attributes:
        per_second: between warm-up and end.
        cpu_us: this process's processor time for one unit.
        done: units, warm-up included.
        began: when the warm-up was over, by ``time.monotonic``, which is one clock for all processes of a machine.
    """

    per_second: float
    cpu_us: float
    done: int
    began: float


def together(rates: Sequence[Rate]) -> Rate:
    """Return what several processes have done at the same time."""
    per_second = sum(rate.per_second for rate in rates)
    cpu_us = sum(rate.cpu_us * rate.per_second for rate in rates) / max(per_second, 1e-9)
    return Rate(per_second, cpu_us, sum(rate.done for rate in rates), max(rate.began for rate in rates))


def in_processes(count: int, work: Callable[..., Result], *arguments: Any) -> list[Result]:
    """Call a function in processes of its own, with its number first, so that none inherits threads or warm caches.

    Each call calls ``ready`` when it has prepared, and goes on when all have.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, context, _remember, (context.Barrier(count),)) as pool:
        return [future.result() for future in [pool.submit(work, number, *arguments) for number in range(count)]]


def _remember(barrier: Barrier) -> None:
    _barriers.append(barrier)


def ready() -> None:
    """Wait for the other processes; what was made until now is kept out of the garbage collector's sight."""
    gc.collect()
    gc.freeze()
    _barriers[0].wait(START_SECONDS)


def window(count: Callable[[], int], seconds: float, used_up: threading.Event | None = None) -> Rate:
    """Let others work for a warm-up and some seconds; ``done`` is what was counted in the end.

    Args:
        count: how many units are done.
        seconds: how long, after the warm-up.
        used_up: ends it earlier.
    """
    waiting = used_up or threading.Event()
    waiting.wait(WARM_UP_SECONDS)
    began, before, cpu = time.monotonic(), count(), time.process_time()
    waiting.wait(seconds)
    done = count() - before
    passed, cpu = time.monotonic() - began, time.process_time() - cpu
    return Rate(done / passed, cpu / max(done, 1) * 1e6, count(), began)


def in_threads(
    count: int,
    client: Callable[[int], AbstractContextManager[Callable[[], int]]],
    seconds: float,
    used_up: threading.Event | None = None,
) -> Rate:
    """Run clients, each in a thread: entered once, then its step again and again; each step returns its units.

    Args:
        count: how many clients; each is given its number.
        client: prepares, yields the step, cleans up.
        seconds: how long, after the warm-up.
        used_up: ends it earlier.
    """
    done, stopping, started = [0] * count, threading.Event(), threading.Barrier(count + 1)

    def loop(number: int) -> None:
        try:
            with client(number) as step:
                started.wait(START_SECONDS)
                while not stopping.is_set():
                    done[number] += step()
        except BaseException:
            started.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        running = [pool.submit(loop, number) for number in range(count)]
        try:
            started.wait(START_SECONDS)
            rate = window(lambda: sum(done), seconds, used_up)
        except threading.BrokenBarrierError:
            rate = Rate(0, 0, 0, 0)
        finally:
            stopping.set()
        errors = [error for future in running if (error := future.exception()) is not None]
        if errors:  # the others only say that the start was called off
            raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return rate._replace(done=sum(done))
