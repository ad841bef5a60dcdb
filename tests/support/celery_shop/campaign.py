"""Chains and chords whose workers are killed at random moments, and where those that vanish were seen last."""

import random
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from celery import Celery, chain, chord

from support.celery_shop.workers import Workers, is_empty
from support.waiting import wait_until
from support.workers.business import Business

LINKS = 3
BACKLOG = 8
"""Messages that wait for a worker: some do at each kill."""

LIFE_SECONDS = (0.5, 4.0)
"""How long a worker lives, once it works."""

BETWEEN_SECONDS = 0.4
"""Between kills of one process of a pool, on the average."""

SETTLED_SECONDS = 90.0
"""Once no more is killed, all that the broker has is done sooner."""


@dataclass
class Outcome:
    """What became of chains and chords; how often effects were ``applied`` in the end, and were ``doubled`` before."""

    sent: Counter[str]
    kills: Counter[str]
    ids: list[str]
    applied: Counter[str]
    doubled: dict[str, int]
    vanished: dict[str, str]
    """The first message that is missing of each that did not end, and where it was seen last."""

    def __str__(self) -> str:
        where = Counter(f"{name.split('-')[0]}: {last}" for name, last in self.vanished.items())
        return (
            f"{dict(self.sent)}, kills {dict(self.kills)}, effects doubled {len(self.doubled)}, "
            f"vanished {len(self.vanished)} {dict(where)}"
        )


class Campaign:
    """Sends chains and chords of one task, ``inbox`` or ``plain``, and kills workers."""

    def __init__(self, task: str, *, redis_url: str, workers: Workers, notes: Path, business: Business, seed: int):
        self._app = Celery("sender", broker=redis_url, backend=redis_url, set_as_current=False)
        self._task = task
        self._workers = workers
        self._notes = notes
        self._business = business
        self._random = random.Random(seed)
        self._sent: dict[str, list[str]] = {}
        self._groups: dict[str, str] = {}
        self._kills: Counter[str] = Counter()

    def run(self, seconds: float) -> Outcome:
        """Send and kill for so long; then let workers end what the broker has.

        With an inbox, what has vanished is sent again under the same ids, and the outcome has what became of it.
        """
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._one_life(until)
        self._workers.start()
        self._settle()
        outcome = self._outcome()
        if self._task == "inbox":
            for name in outcome.vanished:
                self._send(name)
            self._settle()
            outcome.applied = self._business.applied()
        self._workers.kill()
        consumer = self._app.backend.result_consumer
        consumer.stop()
        consumer.subscribed_to.clear()  # results that end later would speak to a server that is gone
        return outcome

    def _settle(self) -> None:
        wait_until(lambda: is_empty(self._app), "the broker has nothing", timeout=SETTLED_SECONDS, every=0.2)

    def _one_life(self, until: float) -> None:
        """Let a worker work, kill processes of its pool, and then all of it."""
        worker = psutil.Process(self._workers.start().pid)
        before = self._noted("taken")
        wait_until(lambda: self._top_up() and self._noted("taken") > before, "a worker works")
        end = min(until, time.monotonic() + self._random.uniform(*LIFE_SECONDS))
        kill_at = time.monotonic() + self._random.expovariate(1 / BETWEEN_SECONDS)
        while (now := time.monotonic()) < end:
            self._top_up()
            if now > kill_at and (pool := worker.children()):
                with suppress(psutil.NoSuchProcess):
                    self._random.choice(pool).kill()
                self._kills["process"] += 1
                kill_at = now + self._random.expovariate(1 / BETWEEN_SECONDS)
        self._workers.kill()
        self._kills["worker"] += 1

    def _top_up(self) -> bool:
        """Send, unless enough waits."""
        with self._app.connection_for_read() as connection:
            waiting = connection.default_channel.client.llen(self._app.conf.task_default_queue)
        if waiting < BACKLOG:
            self._send(f"{self._random.choice(('chain', 'chord'))}-{len(self._sent)}")
        else:
            time.sleep(0.005)  # pace, not a wait: the worker is to have the processor
        return True

    def _send(self, name: str) -> None:
        is_chord = name.startswith("chord")
        ids = [f"{name}.{number}" for number in range(LINKS + is_chord)]
        links = [self._app.signature(self._task, immutable=True, task_id=one) for one in ids]
        if is_chord:
            self._groups[name] = chord(links[:LINKS], links[LINKS]).apply_async().parent.id
        else:
            chain(links).apply_async()
        self._sent[name] = ids

    def _noted(self, what: str) -> int:
        return self._notes.read_bytes().count(f"{what} ".encode()) if self._notes.exists() else 0

    def _outcome(self) -> Outcome:
        applied = self._business.applied()
        # Of a chain, the campaign sends the first link; of a chord, all members.
        last_seen = {
            one: "sent" for name, ids in self._sent.items() for one in ids[: LINKS if name in self._groups else 1]
        }
        for line in self._notes.read_text().splitlines():
            what, one = line.split()
            last_seen[one] = what
        return Outcome(
            sent=Counter(name.split("-")[0] for name in self._sent),
            kills=self._kills,
            ids=[one for ids in self._sent.values() for one in ids],
            applied=applied,
            doubled={one: count for one, count in applied.items() if count > 1},
            vanished={
                name: f"{missing.split('.')[1]} {last_seen.get(missing) or self._why_unsent(name)}"
                for name, ids in self._sent.items()
                if (missing := next((one for one in ids if one not in applied), None))
            },
        )

    def _why_unsent(self, name: str) -> str:
        if name not in self._groups:
            return "never sent"
        backend = self._app.backend
        counted = backend.client.zcard(backend.get_key_for_group(self._groups[name], ".j"))
        return f"never sent, {counted} of {LINKS} counted"
