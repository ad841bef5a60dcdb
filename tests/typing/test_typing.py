"""What people's type checker says about their use of txbox."""

from pathlib import Path

from mypy import api

ACCEPTED = """
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel
from sqlalchemy import Connection, Engine
from sqlalchemy.orm import Session, scoped_session

from txbox import DeadLetter, DeadLetters, Inbox, Message, Mismatch, Outbox, Outcome, Outgoing, Recorded, identify
from txbox.leases import idempotent
from txbox.instrumentation import Event, Settled
from txbox.leases import Acquisition, Lease, Ledger, PostgresLedger
from txbox.relay import AsyncFunctionPublisher, AsyncPublisher, FunctionPublisher
from txbox.relay import OutboxMessage, Publisher, Refused, Relay
from txbox_aws.lambda_ import sqs_handler
from txbox_workers.memory_source import MemorySource
from txbox_workers.worker import Worker

inbox = Inbox("billing", schema=None, fingerprint=True, wait_seconds=0.5)


def by_hand(connection: Connection, session: Session, scoped: scoped_session[Session]) -> None:
    first: bool = inbox.record(connection, "m-1", b"body")
    again: bool = inbox.record(session, "m-1", "body")
    inbox.record(scoped, "m-1", "body")
    ids: set[str] = inbox.record_many(session, ["m-1"])
    inbox.record_many(session, {"m-1": b"body"})
    found: Recorded = inbox.sort_out(connection, (message_id for message_id in ids))
    assert first or again or found.first


def by_worker(engine: Engine) -> None:
    def handler(session: Session, message: Message) -> None:
        session.add(message.json())

    def batch_handler(session: Session, messages: Sequence[Message]) -> None:
        session.add_all(message.json() for message in messages)

    def hook(event: Event) -> None:
        if isinstance(event, Settled) and event.outcome is Outcome.DEAD:
            print(event.message_id, event.error)

    source = MemorySource([Message("m-1", b"{}")])
    Worker(source, inbox=inbox, engine=engine, handler=handler, hooks=[hook])
    Worker(source, inbox=inbox, engine=engine, batch_handler=batch_handler, transactions="message")


class Purchase(BaseModel):
    cents: int


@dataclass
class Refund:
    cents: int


def by_message_type(engine: Engine, ledger: Ledger, session: Session) -> None:
    def handler(session: Session, entry: Purchase | Refund) -> None:
        print(entry.cents)

    def both(session: Session, purchase: Purchase, message: Message) -> None:
        print(purchase.cents, message.id)

    def with_lease(session: Session, purchase: Purchase, message: Message, lease: Lease) -> None:
        print(purchase.cents, message.id, lease.attempt)

    def alone(refund: Refund, lease: Lease) -> None:
        print(refund.cents, lease.attempt)

    def batch(session: Session, purchases: Sequence[Purchase], messages: Sequence[Message]) -> None:
        print(len(purchases), len(messages))

    def only(session: Session, purchases: list[Purchase]) -> None:
        print(len(purchases))

    source = MemorySource()
    Worker(source, inbox=inbox, engine=engine, handler=handler)
    Worker(source, inbox=inbox, engine=engine, handler=both)
    Worker(source, inbox=inbox, ledger=ledger, engine=engine, handler=with_lease)
    Worker(source, ledger=ledger, handler=alone)
    Worker(source, inbox=inbox, engine=engine, batch_handler=batch)
    sqs_handler(inbox=inbox, engine=engine, batch_handler=only)
    Outbox().publish(session, "queue", Purchase(cents=1), key="a")
    Outbox().publish_many(session, [Outgoing("queue", Refund(1)), Outgoing("queue", b"{}"), Outgoing("queue", "{}")])


def by_lease(engine: Engine, message: Message) -> None:
    ledger: Ledger = PostgresLedger("mailing", engine=engine, schema=None)

    @idempotent(ledger=ledger, lease_seconds=60, wait_seconds=5.0, fingerprint=True)
    def send_mail(message: Message, greeting: str = "hello") -> str:
        return greeting + message.text

    @idempotent(ledger=ledger, identify=lambda order, *, to: f"{order}/{to}")
    async def send_gift(order: int, *, to: str) -> int:
        return order

    async def give() -> int:
        return await send_gift(1, to="ann")

    sent: str = send_mail(message, greeting="hi")
    again: str = idempotent(send_mail, ledger=ledger)(message)
    acquisition: Acquisition = ledger.acquire(message.id, lease_seconds=5)
    if acquisition.lease is not None:
        acquisition.lease.ensure()
        ledger.complete(acquisition.lease, (sent + again).encode())


class Hooks:
    async def send(self, messages: Sequence[OutboxMessage]) -> Sequence[Refused]:
        return [Refused(message, "gone", final=True) for message in messages]


def by_relay(engine: Engine, queue: Publisher, bus: AsyncPublisher) -> None:
    async def post(message: OutboxMessage) -> int:
        return len(message.body)

    Relay(engine, {"hook": Hooks()}, concurrency=300)
    Relay(engine, {"a": queue, "b": bus, "c": AsyncFunctionPublisher(post, at_once=2), "d": FunctionPublisher(print)})


def by_a_person(letters: DeadLetters) -> None:
    def send(letter: DeadLetter) -> None:
        print(letter.body.decode())

    for letter in letters.list("billing"):
        if letter.dead_letter_id is not None:
            letters.redrive(letter.dead_letter_id, send)


def choose(message: Message) -> str:
    return message.headers.get("purchase-id") or identify(message)


try:
    raise Mismatch("billing", ["m-1"])
except Mismatch as error:
    print(error.message_ids[0].upper())
"""

# Each line is wrong, for the reason beside it.
REFUSED = """
from sqlalchemy import Engine
from sqlalchemy.orm import Session
from txbox import Inbox, Message, Outbox
from txbox.leases import idempotent
from txbox.leases import Ledger
from txbox.relay import AsyncFunctionPublisher, OutboxMessage, Relay
from txbox_workers.memory_source import MemorySource
from txbox_workers.worker import Worker

def wrong(engine: Engine, session: Session, inbox: Inbox, message: Message) -> None:
    Inbox()  # call-arg
    Inbox("billing", "schema")  # call-arg
    inbox.record(engine, "m-1")  # arg-type
    inbox.record(session, 7)  # arg-type
    inbox.record(session, "m-1", {"a": 1})  # arg-type
    inbox.record_many(session, [1, 2])  # list-item
    first: str = inbox.record(session, "m-1")  # assignment
    message.body = b"other"  # misc
    message.headers["a"] = "b"  # index
    Worker(MemorySource(), inbox=inbox, engine=engine, handler=print, transactions="both")  # arg-type
    Worker(MemorySource(), inbox=inbox, engine=engine, handler=lambda a, b, c, d: None)  # arg-type
    Outbox().publish(session, "queue", {"cents": 1})  # arg-type
    Outbox().publish(session, "queue", 7)  # arg-type

def wrong_leases(engine: Engine, ledger: Ledger, message: Message) -> None:
    @idempotent(ledger=ledger)
    def send(message: Message) -> str:
        return message.text

    send()  # call-arg
    send("m-1")  # arg-type
    count: int = send(message)  # assignment
    idempotent(send)  # call-overload
    idempotent(send, ledger=engine)  # call-overload
    idempotent(send, ledger=ledger, lease_seconds="30")  # call-overload
    ledger.acquire(message)  # arg-type
    ledger.complete(ledger.acquire("m-1").lease)  # arg-type

class Numbered:
    async def send(self, messages: list[int]) -> list[int]:
        return messages

def wrong_publishers(engine: Engine) -> None:
    AsyncFunctionPublisher(print)  # arg-type
    AsyncFunctionPublisher(lambda message: 7)  # arg-type, return-value
    Relay(engine, {"own": Numbered()})  # dict-item
    Relay(engine, {"own": print})  # dict-item
"""


def test_mypy_accepts_what_is_right_and_refuses_what_is_wrong(tmp_path: Path) -> None:
    accepted, refused = tmp_path / "accepted.py", tmp_path / "refused.py"
    accepted.write_text(ACCEPTED)
    refused.write_text(REFUSED)
    # With the project's own configuration and cache, so that a run takes a second and not ten.
    output, problems, _ = api.run(
        ["--no-error-summary", "--hide-error-context", "--no-pretty", str(accepted), str(refused)]
    )
    assert problems == ""
    assert [line for line in output.splitlines() if "accepted.py" in line] == []
    found: dict[int, set[str]] = {}
    for line in output.splitlines():
        if ": error: " in line:
            found.setdefault(int(line.split(":")[1]), set()).add(line.rpartition("[")[2].rstrip("]"))
    expected = {
        number: set(line.partition("  # ")[2].split(", "))
        for number, line in enumerate(REFUSED.splitlines(), 1)
        if "  # " in line
    }
    assert found == expected, output
