"""The memory of a process and of those below it, and what else they use, sampled while it runs. Linux only.

As a program, it runs a command and says how much memory it took::

    python benchmarks/bulk_load_size/processes.py txbox bulk-load s3a://lake/orders/ …
"""

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

DRIVER, JVM, WORKERS, TOGETHER = "driver's Python", "JVM", "Python workers", "together"
DISK = "Spark's disk"
SAMPLE_SECONDS = 0.25

_TICKS = os.sysconf("SC_CLK_TCK")


class Process(NamedTuple):
    """One process at a moment.

    Attributes:
        number: its PID.
        kind: the first one, a JVM, or a Python below a JVM.
        megabytes: in memory; a page that several processes share, as forked ones do, counts in parts (PSS).
        cpu_seconds: processor time so far, without its children's.
    """

    number: int
    kind: str
    megabytes: float
    cpu_seconds: float


class Samples:
    """What was seen of a tree of processes.

    Attributes:
        peaks: megabytes, by kind: those of all processes of a kind at the same moment, and of all kinds; and on disk.
    """

    def __init__(self) -> None:
        self.peaks: dict[str, float] = {}
        self._cpu_seconds: dict[int, float] = {}

    @property
    def cpu_seconds(self) -> float:
        """Processor time of all processes, as far as they were seen."""
        return sum(self._cpu_seconds.values())

    def add(self, processes: list[Process], disk: float) -> None:
        """Add what was seen at one moment; ``disk`` is in megabytes."""
        now = {TOGETHER: sum(one.megabytes for one in processes), DISK: disk}
        for one in processes:
            now[one.kind] = now.get(one.kind, 0.0) + one.megabytes
            self._cpu_seconds[one.number] = one.cpu_seconds
        for kind, megabytes in now.items():
            self.peaks[kind] = max(self.peaks.get(kind, 0.0), megabytes)


@contextmanager
def sampled(root: int, folder: Path) -> Iterator[Samples]:
    """Sample a process and those below it, and the files in a folder, until the block ends."""
    samples, ended = Samples(), threading.Event()

    def sample() -> None:
        while not ended.wait(SAMPLE_SECONDS):
            samples.add(tree(root), _on_disk(folder))

    sampler = threading.Thread(target=sample, name="memory", daemon=True)
    sampler.start()
    try:
        yield samples
    finally:
        ended.set()
        sampler.join()


def tree(root: int) -> list[Process]:
    """Return this process, the JVMs below it, and the Pythons below those."""
    children: dict[int, list[tuple[int, str]]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # it has ended
                name, parent, _ = _stat(int(folder.name))
                children.setdefault(parent, []).append((int(folder.name), name))
    found: list[Process] = []
    waiting = [(root, DRIVER)]
    while waiting:
        number, kind = waiting.pop()
        with suppress(OSError):
            if kind:
                found.append(Process(number, kind, _megabytes(number), _stat(number)[2]))
        for child, name in children.get(number, ()):
            waiting.append((child, JVM if name == "java" else WORKERS if kind in (JVM, WORKERS) else ""))
    return found


def measured(
    command: Sequence[str], folder: Path, stdout: IO[str] | None = None, stderr: IO[str] | None = None
) -> tuple[int, Samples]:
    """Run a command to its end; return its exit status, and what was seen of it.

    Args:
        command: the program and its arguments.
        folder: where Spark has its files, on disk.
        stdout, stderr: for what the command prints; None: where this process prints.
    """
    environment = {**os.environ, "SPARK_LOCAL_DIRS": str(folder)}
    process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=environment)
    with process, sampled(process.pid, folder) as samples:
        try:
            status = process.wait()
        except BaseException:
            process.terminate()
            raise
    return status, samples


def server_cpu_seconds(backend: int) -> float | None:
    """Return the processor time of a Postgres server so far; None: it is not on this machine.

    ``backend`` is the PID of one of its processes. What has ended counts as its parent's.
    """
    try:
        name, postmaster, _ = _stat(backend)
        if name != "postgres":
            return None
        ended = Path(f"/proc/{postmaster}/stat").read_text().rpartition(")")[2].split()[13:15]
    except OSError:
        return None
    seconds = sum(map(int, ended)) / _TICKS
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                _, parent, own = _stat(int(folder.name))
                seconds += own if parent == postmaster else 0
    return seconds


def _stat(number: int) -> tuple[str, int, float]:
    """Return a process's name, its parent, and its processor time in seconds."""
    name, _, rest = Path(f"/proc/{number}/stat").read_text().partition("(")[2].rpartition(")")
    fields = rest.split()
    return name, int(fields[1]), (int(fields[11]) + int(fields[12])) / _TICKS


def _megabytes(number: int) -> float:
    for line in Path(f"/proc/{number}/smaps_rollup").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "Pss":
            return int(value.split()[0]) / 1024
    return 0.0  # it has ended, and was not waited for


def _on_disk(folder: Path) -> float:
    """Return the megabytes of the files below a folder."""
    found = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # it has been removed
                found += Path(parent, name).stat().st_blocks * 512
    return found / 2**20


def main() -> int:
    """Run the command that the arguments are, and print the peak of each kind of process; return its exit status."""
    with tempfile.TemporaryDirectory(prefix="txbox-local-") as folder:
        status, samples = measured(sys.argv[1:], Path(folder))
    for kind, megabytes in samples.peaks.items():
        print(f"{kind:16} {megabytes:8,.0f} MB at the peak", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
