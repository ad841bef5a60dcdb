"""The crew: worker processes that are killed again and again, and replaced."""

import random
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from txbox import TxboxError
from txbox_workers.demo.worker_process import Orders

__all__ = ["Crew", "Kills"]

MOMENTS = ("anywhere", "committed", "received", "handling")
"""Where a worker dies: killed from outside at any instant, between commit and ack, between receive and
transaction, or between insert and commit."""


@dataclass(slots=True)
class Kills:
    """How many workers were killed, and where."""

    anywhere: int = 0
    committed: int = 0
    received: int = 0
    handling: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.anywhere + self.committed + self.received + self.handling


@dataclass(slots=True)
class _Member:
    process: subprocess.Popen[bytes]
    journal: Path
    moment: str
    kill_at_bytes: int
    number: int


class Crew:
    """Keeps a number of worker processes alive, and has each die after a while until enough have died."""

    def __init__(
        self,
        *,
        queue_url: str,
        schema: str,
        directory: Path,
        environment: dict[str, str],
        workers: int,
        kills: int,
        batches_per_life: int,
        visibility_seconds: int,
        seed: int,
    ) -> None:
        """Prepare; ``tend`` starts the workers.

        Args:
            queue_url: where they work.
            schema: where their tables are.
            directory: for journals and logs.
            environment: theirs.
            workers: how many at a time.
            kills: how many are to be killed.
            batches_per_life: about how many batches a worker does before it is killed.
            visibility_seconds: how long a delivery is theirs.
            seed: of the random choices.
        """
        self.kills = Kills()
        self.started = 0
        self._queue_url = queue_url
        self._schema = schema
        self._directory = directory
        self._environment = environment
        self._workers = workers
        self._kills_wanted = kills
        self._batches_per_life = batches_per_life
        self._visibility_seconds = visibility_seconds
        self._random = random.Random(seed)  # noqa: S311 - choices of the demo, no secrets
        self._members: list[_Member] = []

    def tend(self) -> None:
        """Bury the dead, kill whose time has come, start who is missing. Called again and again.

        Raises:
            TxboxError: a worker ended that was not killed.
        """
        for member in list(self._members):
            status = member.process.poll()
            if status is not None:
                self._bury(member, status)
            elif member.moment == "anywhere" and _size(member.journal) >= member.kill_at_bytes:
                member.process.kill()
                self._bury(member, member.process.wait())
        while len(self._members) < self._workers:
            self._members.append(self._start())

    def stop(self, timeout: float = 30.0) -> None:
        """Have every worker drain and end; one that does not in time is killed, and its messages come again."""
        for member in self._members:
            member.process.send_signal(signal.SIGTERM)
        for member in self._members:
            try:
                member.process.wait(timeout)
            except subprocess.TimeoutExpired:
                member.process.kill()
                member.process.wait()
            _close(member)
        self._members = []

    def kill(self) -> None:
        """End every worker at once."""
        for member in self._members:
            member.process.kill()
            member.process.wait()
            _close(member)
        self._members = []

    def _start(self) -> _Member:
        self.started += 1
        number = self.started
        # A worker dies only while there are deaths to die; those alive already have theirs foretold.
        doomed = self.kills.total + sum(bool(member.moment) for member in self._members) < self._kills_wanted
        moment = MOMENTS[number % len(MOMENTS)] if doomed else ""
        batches = max(1, round(self._batches_per_life * self._random.uniform(0.5, 1.5)))
        journal = self._directory / f"worker-{number:03}.journal"
        orders = Orders(
            queue_url=self._queue_url,
            schema=self._schema,
            journal=str(journal),
            visibility_seconds=self._visibility_seconds,
            die="" if moment == "anywhere" else moment,
            die_after=max(1, batches * _FIRST_PER_BATCH) if moment == "handling" else batches,
            seed=self._random.randrange(2**32),
        )
        with (self._directory / f"worker-{number:03}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "txbox_workers.demo.worker_process"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )
        if process.stdin is not None:
            process.stdin.write(f"{orders.as_json()}\n".encode())
            process.stdin.flush()
        return _Member(process, journal, moment, batches * _JOURNAL_BYTES_PER_BATCH, number)

    def _bury(self, member: _Member, status: int) -> None:
        _close(member)
        self._members.remove(member)
        if status != -signal.SIGKILL or not member.moment:
            log = (self._directory / f"worker-{member.number:03}.log").read_text(errors="replace").strip()
            last = log.splitlines()[-1] if log else "it said nothing"
            raise TxboxError(f"worker {member.number} ended by itself with status {status}: {last}")
        setattr(self.kills, member.moment, getattr(self.kills, member.moment) + 1)


_FIRST_PER_BATCH = 6
"""About how many of a batch's ten messages are no duplicates."""

_JOURNAL_BYTES_PER_BATCH = 10 * 2 * 45


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _close(member: _Member) -> None:
    if member.process.stdin is not None:
        member.process.stdin.close()
