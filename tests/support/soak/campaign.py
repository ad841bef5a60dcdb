"""The campaign: publishes orders, keeps the processes alive, and does to them and to their servers what can happen."""

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING

import psutil
from sqlalchemy import create_engine
from sqlalchemy.exc import DBAPIError

from support.aws.queues import held
from support.soak.broker import REFUSED, Broker
from support.soak.processes import ACCOUNTS, AT_WORK, BILLING, MAILING, RELAY, Setting, fork
from support.waiting import wait_until
from txbox import Outbox, Outgoing
from txbox_local import LocalPostgres

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

BUSINESS = (
    "CREATE TABLE placed (message_id text PRIMARY KEY, key text NOT NULL, number int NOT NULL, kind text NOT NULL)",
    "CREATE TABLE effect (position bigserial, message_id text, key text, number int NOT NULL, account int NOT NULL)",
    "CREATE TABLE account (account int PRIMARY KEY, balance bigint NOT NULL)",
    f"INSERT INTO account SELECT account, 0 FROM generate_series(0, {ACCOUNTS - 1}) AS account",
)
"""The tables of the business: the truth, told by nothing of txbox's."""

PLACE = "INSERT INTO placed (message_id, key, number, kind) VALUES (%s, %s, %s, %s)"
KINDS = (("poison", 0.005), ("flaky", 0.03), ("freezing", 0.005), ("deadly", 0.003), ("refused", 0.003))
ROLES = (RELAY, RELAY, BILLING, BILLING, BILLING, MAILING, MAILING)
KEYS = 40
MOST_WAITING = 400
"""Orders are placed more slowly while so many messages wait: what befalls those that nobody works on is nothing."""

HAPPENINGS = ("kills", "stops", "backends terminated", "server crashes")
"""What is counted of what happens; a campaign goes on until each has."""

WEIGHTS = (30, 15, 45, 4)
"""How often processes are killed, and stopped, and backends terminated, and the server crashes: in proportion."""

STOPPED_SECONDS = (0.5, 7.0)
SETTLE_SECONDS = 240.0


@dataclass(slots=True)
class _Member:
    role: str
    process: BaseProcess
    continues_at: float | None = None


@dataclass
class Campaign:
    """One soak.

    Attributes:
        server: Postgres, on a fixed port and in a named directory: it comes back as what it was.
        broker: the faulty one.
        sqs: a client that goes past it.
        setting: what every process is told.
        seed: of all random choices. What comes of them depends on time, too.
        counts: what was done.
    """

    server: LocalPostgres
    broker: Broker
    sqs: "SQSClient"
    setting: Setting
    seed: int
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._engine = create_engine(self.setting.url, pool_size=3)
        self._members: list[_Member] = []
        self._placing = threading.Event()
        self._placing.set()
        self.ended_by_themselves: list[str] = []
        self.late: list[str] = []

    def run(self, seconds: float) -> None:
        """Do everything to everyone for so long; then let them finish, and stop them."""
        placer = threading.Thread(target=self._place, name="soak-placer", daemon=True)
        placer.start()
        roles = [role for role in ROLES if role != RELAY or not self.setting.has_no_broker]
        self._members = [self._start(role) for role in roles]
        happenings = self._happenings()
        try:
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline or not all(self.counts[what] for what in HAPPENINGS):
                time.sleep(self._random.expovariate(1 / 0.7))  # not a wait: this is how often something happens
                self._tend()
                next(happenings)()
            self.broker.calm()
            self._placing.clear()
            placer.join(60)
            assert not placer.is_alive(), "placing orders hangs"
            wait_until(self._settled, "all messages to be settled", timeout=SETTLE_SECONDS, every=0.3)
            self._end()
        except AssertionError as error:
            error.add_note(f"seed {self.seed}, {self.summary()}; left: {self._left()}")
            raise
        finally:
            self._placing.clear()
            for member in self._members:
                member.process.kill()
                member.process.join(20)
            self._engine.dispose()

    def summary(self) -> str:
        """Say in one line what was done."""
        done = ", ".join(f"{count} {what}" for what, count in sorted(self.counts.items()))
        return f"{done}, {self.broker.faults.total()} broker faults, {len(self.broker.sent)} messages sent"

    # --- orders ------------------------------------------------------------------------------------------------------

    def _place(self) -> None:
        """Publish orders, each with its row in ``placed``; take some back; try no transaction twice."""
        chance = random.Random(self.seed + 1)
        numbers: Counter[str] = Counter()
        outbox = Outbox()
        while self._placing.is_set():
            orders = []
            for _ in range(chance.randint(1, 12)):
                key = f"key-{chance.randrange(KEYS)}"
                numbers[key] += 1
                orders.append((f"{key}-{numbers[key]}", key, numbers[key], self._kind(chance)))
            with contextlib.suppress(DBAPIError, _TakenBack), self._engine.begin() as connection:
                for order in orders:
                    connection.exec_driver_sql(PLACE, order)
                outbox.publish_many(connection, [self._outgoing(*order) for order in orders])
                if chance.random() < 0.05:
                    raise _TakenBack
            time.sleep(0.15)  # not a wait: the rate of orders
            while self._placing.is_set() and self._waiting() > MOST_WAITING:
                time.sleep(0.2)

    def _outgoing(self, message_id: str, key: str, number: int, kind: str) -> Outgoing:
        body = {"key": key, "number": number, "kind": REFUSED if kind == "refused" else kind}
        return Outgoing(self.setting.orders, json.dumps(body), key=key, message_id=message_id)

    @staticmethod
    def _kind(chance: random.Random) -> str:
        drawn = chance.random()
        for kind, share in KINDS:
            if drawn < share:
                return kind
            drawn -= share
        return "good"

    def _waiting(self) -> int:
        return self._held(self.setting.orders) + self._held(self.setting.mails) + (self._unsent() or 0)

    def _held(self, queue: str) -> int:
        if self.setting.has_no_broker:
            return 0  # it is in the outbox
        return sum(held(self.sqs, queue).values())

    def _unsent(self) -> int | None:
        with contextlib.suppress(DBAPIError), self._engine.connect() as connection:
            return int(connection.exec_driver_sql("SELECT count(*) FROM outbox_message").scalar_one())
        return None

    # --- what happens ------------------------------------------------------------------------------------------------

    def _happenings(self) -> Iterator[Callable[[], None]]:
        """Yield each of them once, and then any, by their weights."""
        actions = (self._kill, self._stop, self._terminate, self._crash)
        yield from self._random.sample(actions, len(actions))
        while True:
            yield self._random.choices(actions, WEIGHTS)[0]

    def _start(self, role: str) -> _Member:
        self.counts["processes"] += 1
        return _Member(role, fork(self.setting, role, self._random.randrange(2**32)))

    def _tend(self) -> None:
        """Have those that were stopped go on in their time, and start another for each that has ended."""
        for index, member in enumerate(self._members):
            if member.continues_at is None and self._is_stopped(member):
                member.continues_at = time.monotonic() + self._random.uniform(*STOPPED_SECONDS)
                self.counts["stops in a handler"] += 1
            if member.continues_at is not None and time.monotonic() >= member.continues_at:
                self._continue(member)
            if (status := member.process.exitcode) is not None:
                pid = member.process.pid
                assert pid is not None
                if status != -signal.SIGKILL and AT_WORK in self.setting.log(member.role, pid).read_text():
                    self.ended_by_themselves.append(f"{member.role} {pid}: {status}")
                self._members[index] = self._start(member.role)

    @staticmethod
    def _is_stopped(member: _Member) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(member.process.pid).status() == psutil.STATUS_STOPPED
        return False

    def _continue(self, member: _Member) -> None:
        member.continues_at = None
        self._send(member, signal.SIGCONT)

    @staticmethod
    def _send(member: _Member, number: signal.Signals) -> None:
        if member.process.exitcode is None and member.process.pid is not None:
            os.kill(member.process.pid, number)

    def _kill(self) -> None:
        self.counts["kills"] += 1
        self._random.choice(self._members).process.kill()

    def _stop(self) -> None:
        if running := [member for member in self._members if member.continues_at is None]:
            member = self._random.choice(running)
            self.counts["stops"] += 1
            self._send(member, signal.SIGSTOP)
            member.continues_at = time.monotonic() + self._random.uniform(*STOPPED_SECONDS)

    def _terminate(self) -> None:
        sql = (
            "SELECT count(pg_terminate_backend(pid)) FROM (SELECT pid FROM pg_stat_activity "
            "WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() ORDER BY random() LIMIT 1) AS victim"
        )
        with contextlib.suppress(DBAPIError), self._engine.connect() as connection:
            self.counts["backends terminated"] += int(connection.exec_driver_sql(sql).scalar_one())

    def _crash(self) -> None:
        """End the server as ``pg_ctl stop -m immediate`` does: what was not written is lost; and start it again."""
        self.counts["server crashes"] += 1
        if self._random.random() < 0.7:
            # The moment at which it can do most harm: a relay is about to keep a refusal, and then sends what it may.
            self.broker.refused.clear()
            self.broker.refused.wait(2.0)
            time.sleep(self._random.uniform(0.0, 0.1))
        os.kill(self.server.pid, signal.SIGQUIT)
        self.server.stop()
        self.server.start()

    # --- the end -----------------------------------------------------------------------------------------------------

    def _settled(self) -> bool:
        """Whether nothing is left; looked at in the direction in which messages move."""
        self._tend()
        for member in self._members:
            if member.continues_at is not None:
                self._continue(member)
        looks: tuple[Callable[[], int | None], ...] = (
            self._unsent,
            lambda: self._held(self.setting.orders),
            self._unsent,
            lambda: self._held(self.setting.mails),
        )
        return all(look() == 0 for look in looks)

    def _end(self) -> None:
        wait_until(self._all_at_work, "every process to be at work", timeout=60)
        for member in self._members:
            self._send(member, signal.SIGTERM)
        for member in self._members:
            member.process.join(40)
            if member.process.exitcode != 0:
                self.late.append(f"{member.role} {member.process.pid}: {member.process.exitcode}")

    def _all_at_work(self) -> bool:
        self._tend()
        logs = [self.setting.log(member.role, member.process.pid or 0) for member in self._members]
        return all(log.exists() and AT_WORK in log.read_text() for log in logs)

    def _left(self) -> str:
        orders, mails = self._held(self.setting.orders), self._held(self.setting.mails)
        return f"outbox {self._unsent()}, orders {orders}, mails {mails}"


class _TakenBack(Exception):
    """An order was taken back before its commit."""
