"""Chains and chords whose workers are killed at random moments, and where those that vanish were seen last."""

import random
import time
from collections import Counter
from dataclasses import dataclass, field
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
    """What became of chains and chords."""

    sent: Counter[str]
    kills: Counter[str]
    doubled: dict[str, int]
    vanished: dict[str, str] = field(default_factory=dict)
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
        """Send and kill for so long; then let workers end what the broker has."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._one_life(until)
        self._workers.start()
        wait_until(lambda: is_empty(self._app), "the broker has nothing", timeout=SETTLED_SECONDS, every=0.2)
        self._workers.kill()
        outcome = self._outcome()
        consumer = self._app.backend.result_consumer
        consumer.stop()
        consumer.subscribed_to.clear()  # results that end later would speak to a server that is gone
        return outcome

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
            self._send()
        else:
            time.sleep(0.005)  # pace, not a wait: the worker is to have the processor
        return True

    def _send(self) -> None:
        kind = self._random.choice(("chain", "chord"))
        name = f"{kind}-{len(self._sent)}"
        ids = [f"{name}.{number}" for number in range(LINKS + (kind == "chord"))]
        links = [self._app.signature(self._task, immutable=True, task_id=one) for one in ids]
        if kind == "chain":
            chain(links).apply_async()
        else:
            self._groups[name] = chord(links[:LINKS], links[LINKS]).apply_async().parent.id
        self._sent[name] = ids

    def _noted(self, what: str) -> int:
        return self._notes.read_bytes().count(f"{what} ".encode()) if self._notes.exists() else 0

    def _outcome(self) -> Outcome:
        applied = self._business.applied()
        last_seen = dict.fromkeys((ids[0] for ids in self._sent.values()), "sent")
        for ids in self._sent.values():
            if len(ids) > LINKS:  # the members of a chord, which no worker sends
                last_seen.update(dict.fromkeys(ids[:LINKS], "sent"))
        for line in self._notes.read_text().splitlines():
            what, one = line.split()
            last_seen[one] = what
        outcome = Outcome(
            sent=Counter(name.split("-")[0] for name in self._sent),
            kills=self._kills,
            doubled={one: count for one, count in applied.items() if count > 1},
        )
        for name, ids in self._sent.items():
            if missing := next((one for one in ids if one not in applied), None):
                outcome.vanished[name] = f"{missing.split('.')[1]} {last_seen.get(missing) or self._why_unsent(name)}"
        return outcome

    def _why_unsent(self, name: str) -> str:
        if name not in self._groups:
            return "never sent"
        backend = self._app.backend
        counted = backend.client.zcard(backend.get_key_for_group(self._groups[name], ".j"))
        return f"never sent, {counted} of {LINKS} counted"
