"""The processes of the chain, and the moments at which they kill themselves."""

import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from txbox import DeadLetters, Inbox, Message, Outbox, Outcome, Outgoing
from txbox.backoff import Backoff
from txbox.instrumentation import Committed, Event, Received, Settled
from txbox.leases import Lease, PostgresLedger
from txbox.messages.destinations import INBOX, SQS
from txbox.postgres.transactions import ConnectionOrSession
from txbox.postgres.urls import database_engine, database_url
from txbox.relay import OutboxMessage, Publisher, Refused, Relay
from txbox_aws.publishers import aws_publishers
from txbox_aws.sqs import SqsWorker, sqs_client
from txbox_demo.purchases import read_purchases
from txbox_demo.services import billing, place_order, send_mail
from txbox_workers.postgres import PostgresSource, PostgresWorker
from txbox_workers.worker import Worker

DECLINED_SHARE = 0.05  # of all orders: rolled back, as the card is declined, and placed anew
LOST_ANSWER_SHARE = 0.12  # of all messages that the broker has accepted: the relay gets no answer, and sends them again
LOST_ACK_SHARE = 0.18  # of all acks: confirmed by the broker, but not carried out
# Short: a demo need not wait for what a killed process held, or for a server that accepts the next mail.
VISIBILITY_SECONDS, LEASE_SECONDS, BACKOFF = 2, 3.0, Backoff(first_seconds=0.5, longest_seconds=2.0)

INSERTED, COMMITTED = "between insert and commit", "before the ack"
RECEIVED, LEASED, MAILED = "before the transaction", "between lease and mail", "between mail and completion"
CLAIMED, SENT, ANYWHERE = "before the send", "between send and settle", "anywhere"
"""The moments at which processes die, in the report's words."""

N_ROLLED_BACK, N_SENT, N_RECEIVED, N_DUPLICATES = COUNTS = range(4)
"""What processes count, as positions in an array in memory that outlives them."""


@dataclass(slots=True)
class DemoTask:
    """What a process has to do."""

    database_url: str  # with the schema as its search path
    queue_urls: tuple[str, ...]  # billing's and notification's, or inbox:SUBSCRIBER; empty: there is none
    purchases: int  # how many of the file's purchases the shops place
    smtp_port: int  # on 127.0.0.1
    environment: dict[str, str]  # variables that lead to AWS
    seed: int  # of its random choices
    log: str = ""  # the file that receives its output
    slot: int = 0  # its number among those of its role
    slots: int = 1  # how many slots there are
    counts: MutableSequence[int] = field(default_factory=list)  # its slot's; only this process writes them
    moment: str = ""  # where it kills itself; empty: nowhere
    life: int = 0  # after about how many messages

    def engine(self) -> Engine:
        """Return an engine on the schema, with up to ten connections."""
        return database_engine(database_url(self.database_url), pool_size=10)

    def may_die(self, moment: str, messages: int = 1) -> None:
        """Count messages that reach a moment. If it is the task's, die by SIGKILL at the end of its life."""
        if self.moment in (moment, ANYWHERE):
            self.life -= messages
            if self.life <= 0 and self.moment == moment:
                _kill()
            elif self.life <= 0:  # wherever this thread is by then
                threading.Timer(random.uniform(0, 0.05), _kill).start()  # noqa: S311 - no secret


def _kill(after: Callable[[], object] = lambda: None) -> None:
    after()
    os.kill(os.getpid(), signal.SIGKILL)


def run_process(run: Callable[[DemoTask], None], task: DemoTask) -> None:
    """Run a process of the demo: the target of ``multiprocessing``."""
    os.setsid()  # Ctrl-C is for the program that started it
    if parent := multiprocessing.parent_process():
        threading.Thread(target=_kill, args=(parent.join,), daemon=True).start()
    log = os.open(task.log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.environ.update(task.environment)
    random.seed(task.seed)
    run(task)


def run_shop(task: DemoTask) -> None:
    """Place this slot's missing orders, by date. All orders of one customer are in one slot."""
    engine, outbox = task.engine(), Outbox()
    with engine.connect() as connection:
        placed = set(connection.execute(text("SELECT order_id FROM purchase_order")).scalars())
    for purchase in sorted(read_purchases(task.purchases), key=lambda purchase: purchase.ordered_on):
        if purchase.order_id in placed or int(purchase.customer_id) % task.slots != task.slot:
            continue
        if _happens(DECLINED_SHARE):
            with Session(engine) as session:  # under its own id: sent by mistake, it would be no duplicate
                declined = replace(purchase, order_id=f"{purchase.order_id}-declined")
                place_order(session, outbox, task.queue_urls[0], declined)
                session.rollback()
            task.counts[N_ROLLED_BACK] += 1
        with Session(engine) as session, session.begin():
            place_order(session, outbox, task.queue_urls[0], purchase)
            task.may_die(INSERTED)


def run_relay(task: DemoTask) -> None:
    """Send what shop and billing published, in small batches: what a killed relay has sent is sent again."""
    publishers = {SQS: LossyPublisher(aws_publishers()[SQS], task)}
    Relay(task.engine(), publishers, senders=1, batch_size=100, backoff=BACKOFF, keep_sent=timedelta(days=1)).run()


@dataclass(slots=True)
class LossyPublisher:
    """Sends through another publisher, and loses some of its answers: the relay sends those messages again."""

    publisher: Publisher
    task: DemoTask

    def send(self, messages: Sequence[OutboxMessage]) -> Sequence[Refused]:
        """Send, and return as refused also the messages whose answer is lost."""
        self.task.may_die(CLAIMED, len(messages))
        self.task.counts[N_SENT] += len(messages)
        refused = list(self.publisher.send(messages))
        self.task.may_die(SENT, len(messages))
        refused_ids = {refusal.message.id for refusal in refused}
        lost = [one for one in messages if one.id not in refused_ids and _happens(LOST_ANSWER_SHARE)]
        return refused + [Refused(message, "the answer was lost") for message in lost]


def run_billing(task: DemoTask) -> None:
    """Process an inbox: the effect and what it publishes are in the transaction that records the messages."""
    effect = billing(MortalOutbox(task), task.queue_urls[1])
    _work(task, task.queue_urls[0], inbox=Inbox("billing"), engine=task.engine(), effect=effect)


class MortalOutbox(Outbox):
    """An outbox that may kill the process after a publish: what was done is not committed."""

    def __init__(self, task: DemoTask) -> None:
        super().__init__()
        self._task = task

    def publish_many(self, connection_or_session: ConnectionOrSession, messages: Iterable[Outgoing]) -> list[str]:
        """Publish, and die then if it is the moment."""
        ids = super().publish_many(connection_or_session, messages)
        self._task.may_die(INSERTED, len(ids))
        return ids


def run_notification(task: DemoTask) -> None:
    """Work under leases: no transaction covers a mail."""

    def handler(message: Message, lease: Lease) -> None:
        if lease.unknown_attempts:  # it has ended one process, and must not end a second: the report counts both mails
            send_mail(message, lease, task.smtp_port)
            return
        task.may_die(LEASED)
        send_mail(message, lease, task.smtp_port)
        task.may_die(MAILED)

    engine = task.engine()
    ledger, letters = PostgresLedger("notification", engine=engine), DeadLetters(engine)
    _work(task, task.queue_urls[1], ledger=ledger, dead_letters=letters, handler=handler, lease_seconds=LEASE_SECONDS)


def _work(task: DemoTask, queue_url: str, **service: Any) -> None:
    def hook(event: Event) -> None:
        match event:
            case Received():
                task.counts[N_RECEIVED] += len(event.message_ids)
                task.may_die(RECEIVED, len(event.message_ids))
            case Committed(first=first) if first:
                task.may_die(COMMITTED, first)
            case Settled(outcome=Outcome.DUPLICATE):
                task.counts[N_DUPLICATES] += 1

    service |= {"backoff": BACKOFF, "hooks": [hook]}
    if queue_url.startswith(INBOX):
        if "inbox" in service:
            PostgresWorker(**service).run()
        else:  # a ledger alone: no transaction covers the work, so the message is deleted after it
            Worker(PostgresSource(task.engine(), queue_url.removeprefix(INBOX)), **service).run()
        return
    lose_acks(client := sqs_client(queue_url))
    SqsWorker(queue_url, **service, client=client, visibility_seconds=VISIBILITY_SECONDS, wait_seconds=1).run()


def lose_acks(client: Any) -> None:
    """Make some acks confirmed but not carried out, as standard queues may (SQS Developer Guide, At-least-once)."""
    lost = threading.local()

    def before(params: dict[str, Any], **_: Any) -> None:
        lost.entries = [entry for entry in params["Entries"][1:] if _happens(LOST_ACK_SHARE)]
        params["Entries"] = [entry for entry in params["Entries"] if entry not in lost.entries]

    def after(parsed: dict[str, Any], **_: Any) -> None:
        if "Successful" in parsed:
            parsed["Successful"].extend({"Id": entry["Id"]} for entry in lost.entries)

    client.meta.events.register("provide-client-params.sqs.DeleteMessageBatch", before)
    client.meta.events.register("after-call.sqs.DeleteMessageBatch", after)


def _happens(share: float) -> bool:
    return random.random() < share  # noqa: S311 - choices of the demo, no secrets


ROLES: dict[str, tuple[Callable[[DemoTask], None], tuple[str, ...]]] = {
    "shop": (run_shop, (INSERTED, ANYWHERE)),
    "relay": (run_relay, (SENT, ANYWHERE, CLAIMED)),
    "billing": (run_billing, (INSERTED, COMMITTED, ANYWHERE, RECEIVED)),
    "notification": (run_notification, (MAILED, COMMITTED, ANYWHERE, LEASED, RECEIVED)),
}
"""What each role runs, and the moments at which its processes die, in turn."""
