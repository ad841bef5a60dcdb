"""The processes of the soak: relays, billing and mailing. They are forked of a server that has loaded everything.

Billing works in transactions: a row for each effect, a balance on a row that all of them want, and a message for
mailing, published in the same transaction. Mailing works under leases: its effects are calls of the receiver. What
either has received, begun, completed and settled is in its journal.
"""

import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

from support.soak.journal import BEGUN, COMPLETED, ENDED, Journal
from txbox import DeadLetters, EffectUnknown, Inbox, Message, Outbox
from txbox.backoff import Backoff
from txbox.leases import Lease, PostgresLedger
from txbox.messages.destinations import INBOX
from txbox.relay import Relay
from txbox_aws.publishers import SqsPublisher
from txbox_aws.sqs import SqsWorker
from txbox_workers.postgres import PostgresWorker
from txbox_workers.worker import Worker

BILLING, MAILING, RELAY = "billing", "mailing", "relay"
AT_WORK = "at work"
"""What the log of a process has once it has started: from then on it ends only when it is told to."""

ACCOUNTS = 5
MAX_ATTEMPTS = 4
VISIBILITY_SECONDS = 4
LEASE_SECONDS = 4.0
WORKER_BACKOFF = Backoff(first_seconds=0.1, longest_seconds=1.0)
RELAY_BACKOFF = Backoff(first_seconds=0.05, longest_seconds=0.5)

EFFECT = text("INSERT INTO effect (message_id, key, number, account) VALUES (:message_id, :key, :number, :account)")
ADD = text("UPDATE account SET balance = balance + 1 WHERE account = :account")


@dataclass(frozen=True, slots=True)
class Setting:
    """What every process is told.

    Attributes:
        url: the database, with txbox's tables and the business's.
        broker: the URL of the broker.
        orders, mails: the queues' URLs, orders is FIFO; or ``inbox:billing`` and ``inbox:mailing``.
        directory: for logs and journals.
    """

    url: str
    broker: str
    orders: str
    mails: str
    directory: str

    @property
    def has_no_broker(self) -> bool:
        return self.orders.startswith(INBOX)

    def log(self, role: str, pid: int) -> Path:
        """Return the file that has what a process says."""
        return Path(self.directory) / f"{role}-{pid}.log"


def fork(setting: Setting, role: str, seed: int) -> BaseProcess:
    """Start a process, in a few milliseconds once the first was started.

    Args:
        setting: what every process is told.
        role: ``BILLING``, ``MAILING`` or ``RELAY``.
        seed: of its random choices.
    """
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "support.soak.processes"])
    process = context.Process(target=_live, args=(asdict(setting), role, seed), name=f"soak-{role}")
    process.start()
    return process


def _live(setting: dict[str, Any], role: str, seed: int) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    own = Setting(**setting)
    log = os.open(own.log(role, os.getpid()), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.environ |= {"AWS_ENDPOINT_URL_SQS": own.broker, "AWS_ENDPOINT_URL": own.broker}
    random.seed(seed)
    journal = Journal(own.directory, role)
    drained = {BILLING: _bill, MAILING: _mail, RELAY: _relay}[role](own, journal)
    if drained:
        journal.note(ENDED)
    sys.exit(0 if drained else 3)


def _say_at_work() -> None:
    os.write(1, f"{AT_WORK}\n".encode())


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def _note_begun(journal: Journal, message: Message) -> dict[str, Any]:
    """Note a run, and let its message do what it says: fail always, or at times, or end or stop the process."""
    body: dict[str, Any] = json.loads(message.text)
    journal.note(BEGUN, message.id)
    kind = body["kind"]
    drawn = random.random()
    if kind == "poison" or (kind in ("flaky", "freezing") and drawn < 0.4):
        raise RuntimeError(f"{message.id} is {kind}")
    if kind == "deadly" and drawn < 0.5:
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "freezing" and drawn < 0.8:
        os.kill(os.getpid(), signal.SIGSTOP)  # the campaign has it go on, often after the message came again elsewhere
    return body


def _bill(setting: Setting, journal: Journal) -> bool:
    outbox = Outbox()

    def handle(session: Session, message: Message) -> None:
        order = _note_begun(journal, message)
        account = sum(order["key"].encode()) % ACCOUNTS
        effect = {"message_id": message.id, "key": order["key"], "number": order["number"], "account": account}
        session.execute(EFFECT, effect)
        session.execute(ADD, {"account": account})
        mail = {**order, "kind": random.choices(["flaky", "freezing", "good"], [2, 1, 97])[0]}
        outbox.publish(session, setting.mails, json.dumps(mail), key=order["key"], message_id=f"mail-{message.id}")

    return _worker(
        setting.orders,
        inbox=Inbox(BILLING, wait_seconds=0.5),
        engine=create_engine(setting.url, pool_size=4),
        handler=handle,
        transactions=random.choice(["batch", "batch", "message"]),
        hooks=[journal],
        ordered=setting.has_no_broker,
    ).run(started=_say_at_work)


def _worker(queue: str, **options: Any) -> Worker:
    options |= {"threads": 2, "prefetch": random.choice([0, 100]), "max_attempts": MAX_ATTEMPTS}
    options |= {"backoff": WORKER_BACKOFF, "visibility_seconds": VISIBILITY_SECONDS}
    return PostgresWorker(**options) if queue.startswith(INBOX) else SqsWorker(queue, wait_seconds=1, **options)


class _NotedLedger(PostgresLedger):
    """A ledger that notes what it has completed."""

    def __init__(self, engine: Engine, journal: Journal) -> None:
        super().__init__(MAILING, engine=engine)
        self._journal = journal

    def complete(self, lease: Lease, result: bytes | None = None) -> None:
        super().complete(lease, result)
        self._journal.note(COMPLETED, lease.message_id, str(lease.fence))


def _mail(setting: Setting, journal: Journal) -> bool:
    engine = create_engine(setting.url, pool_size=6)

    def handle(message: Message, lease: Lease) -> None:
        _note_begun(journal, message)
        effect = {"message_id": message.id, "fence": lease.fence, "unknown_attempts": lease.unknown_attempts}
        effect["owner"] = f"{os.getpid()}-{lease.fence}"
        request = urllib.request.Request(f"{setting.broker}/receiver", json.dumps(effect).encode())
        try:
            with urllib.request.urlopen(request, timeout=3) as answer:
                accepted = json.load(answer)
        except (OSError, ValueError) as error:
            raise EffectUnknown("the receiver did not answer") from error
        if not accepted:
            raise RuntimeError("the receiver has seen a later owner")

    return _worker(
        setting.mails,
        ledger=_NotedLedger(engine, journal),
        dead_letters=DeadLetters(engine),
        handler=handle,
        hooks=[journal],
        lease_seconds=LEASE_SECONDS,
    ).run(started=_say_at_work)


def _relay(setting: Setting, journal: Journal) -> bool:
    return Relay(
        create_engine(setting.url, pool_size=8),
        {"sqs": SqsPublisher(read_timeout_seconds=4)},
        batch_size=50,
        max_attempts=None,
        backoff=RELAY_BACKOFF,
        publish_timeout_seconds=3,
    ).run(started=_say_at_work)
