"""The supervisor: keeps the processes of all roles running until enough of them have killed themselves."""

import multiprocessing
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from txbox import TxboxError
from txbox_demo.processes import COUNTS, ROLES, DemoTask, run_process
from txbox_demo.sandbox import OnProgress, Progress, Sandbox
from txbox_local.errors import log_tail

STALL_SECONDS = 300.0  # without any progress: something is broken
LOST_SECONDS = 6.0  # the same, while nothing waits: what is missing is lost, and the check says what
# The pause between polls, which no signal can replace: the least, and how many times the last poll's duration.
LOOK_SECONDS, LOOK_PAUSE = 0.1, 10
SPARE = 2.0  # lives are shorter by this factor than the kills need: no slot's work ends before its kills


@dataclass(slots=True)
class Group:
    """The processes of one role of ``ROLES``."""

    name: str
    size: int  # how many run at a time
    kills: int = 0  # how many are to be killed
    messages: int = 0  # about how many all of them see
    killed: Counter[str] = field(default_factory=Counter)  # by moment
    started: int = 0
    running: dict[int, tuple[BaseProcess, DemoTask]] = field(default_factory=dict)  # by slot
    counts: list[Any] = field(default_factory=list)  # by slot; see COUNTS

    def count(self, what: int) -> int:
        """Return the total that all processes have counted."""
        return sum(array[what] for array in self.counts)


class DemoSupervisor:
    """Starts processes with the standard library's fork server: in milliseconds, as it has loaded everything once."""

    def __init__(self, groups: Sequence[Group], task: DemoTask, sandbox: Sandbox, directory: Path) -> None:
        """``task`` holds what all processes share, and ``directory`` their logs."""
        self.groups, self._task, self._sandbox, self._directory = groups, task, sandbox, directory
        self._random = random.Random(task.seed)  # noqa: S311 - choices of the demo, no secrets
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["__main__", "txbox_demo.processes"])
        for group in groups:
            group.counts = [self._context.RawArray("q", len(COUNTS)) for _ in range(group.size)]

    def drive(
        self, stage: str, on_progress: OnProgress, is_ending: Callable[[], bool], is_done: Callable[[Progress], bool]
    ) -> Progress:
        """Keep the processes running until everything has passed the chain, or what is missing is lost. Then kill them.

        That is when nothing more will be published (``is_ending``), nothing waits, and either all has happened or
        nothing happens any more.
        """
        progress, changed_at = Progress(stage), time.monotonic()
        while True:
            for group in self.groups:
                self._tend(group)
            ending, begun = is_ending(), time.monotonic()
            killed = sum(group.killed.total() for group in self.groups)
            before, progress = progress, self._sandbox.progress(stage, killed)
            if before != progress:
                changed_at = begun
            unchanged_seconds = begun - changed_at  # from poll to poll: a poll's own duration never counts
            if ending and not progress.waiting and (is_done(progress) or unchanged_seconds > LOST_SECONDS):
                break
            if unchanged_seconds > STALL_SECONDS:
                remedy = "run again with --url and --keep, and look with `txbox status` and `txbox dead-letters list`"
                raise TxboxError(f"no progress for {STALL_SECONDS:g} s: {progress}; {remedy}")
            on_progress(progress)
            time.sleep(max(LOOK_SECONDS, LOOK_PAUSE * (time.monotonic() - begun)))
        self.kill()
        return progress

    def kill(self) -> None:
        """Kill every process. What one of them held is redelivered."""
        for group in self.groups:
            for process, _ in group.running.values():
                process.kill()
                process.join()

    def _tend(self, group: Group) -> None:
        """Replace processes that were killed, and start missing ones. A shop ends with its orders."""
        for slot in range(group.size):
            if slot in group.running:
                process, task = group.running[slot]
                if process.exitcode is None or (process.exitcode == 0 and group.name == "shop"):
                    continue
                if process.exitcode != -signal.SIGKILL or not task.moment:
                    status = f"ended by itself with status {process.exitcode}"
                    raise TxboxError(f"{process.name} {status}: {log_tail(Path(task.log), 1) or 'its log is empty'}")
                del group.running[slot]
                group.killed[task.moment] += 1
            self._start(group, slot)

    def _start(self, group: Group, slot: int) -> None:
        run, moments = ROLES[group.name]
        # A process that is to die counts as a kill from its start, so that there are no more than asked for.
        dying = sum(bool(task.moment) for process, task in group.running.values() if process.exitcode != 0)
        life = group.messages / (max(group.size, group.kills) * SPARE) * self._random.uniform(0.5, 1.5)
        group.started += 1
        name = f"{group.name} {group.started}"
        task = replace(
            self._task,
            log=str(self._directory / f"{name}.log"),
            slot=slot,
            slots=group.size,
            counts=group.counts[slot],
            moment=moments[(group.started - 1) % len(moments)] if group.killed.total() + dying < group.kills else "",
            life=max(1, round(life)),
            seed=self._random.randrange(2**32),
        )
        process = self._context.Process(target=run_process, args=(run, task), daemon=True, name=name)
        process.start()
        group.running[slot] = process, task
