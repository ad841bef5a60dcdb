"""Workers that are fed from memory, and deliveries to give to a processor alone."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Engine

from support.workers.business import apply
from txbox import Inbox, Message, Outcome
from txbox.backoff import Backoff
from txbox.service import Service
from txbox_workers.delivery import Delivery
from txbox_workers.memory_source import MemorySource
from txbox_workers.worker import Worker

AT_ONCE = Backoff(first_seconds=0.01, longest_seconds=0.02)


def messages(*ids: str) -> list[Message]:
    return [Message(id_, f"body of {id_}".encode(), {"colour": "red"}) for id_ in ids]


def numbered(count: int, prefix: str = "m") -> list[Message]:
    return messages(*(f"{prefix}{number:04}" for number in range(count)))


def feed(source: MemorySource, sent: Iterable[Message]) -> None:
    for message in sent:
        source.send(message)


def make(source: MemorySource, engine: Engine, handler: Any = apply, **options: Any) -> Worker:
    options.setdefault("inbox", Inbox("billing", wait_seconds=0.2))
    if "batch_handler" not in options and "effect" not in options:
        options["handler"] = handler
    return Worker(source, engine=engine, backoff=AT_ONCE, **options)


@contextmanager
def at_work(*services: Service) -> Iterator[None]:
    """Start workers, or relays, and see that they drain at the end."""
    for service in services:
        service.start()
    try:
        yield
    finally:
        stopped = [service.stop(20) for service in services]
        assert all(stopped)


def work_off(source: MemorySource, engine: Engine, handler: Any = apply, **options: Any) -> Worker:
    """Work until everything is acked."""
    worker = make(source, engine, handler, **options)
    with at_work(worker):
        assert source.wait_until_empty(60), "something was never acked"
    return worker


def delivery(message_id: str, *, receive_count: int = 1, group: str | None = None, receipt: str = "") -> Delivery:
    (message,) = messages(message_id)
    return Delivery(
        message, receipt=receipt or f"{message_id}-{receive_count}", receive_count=receive_count, group=group
    )


def process(worker: Worker, *deliveries: Delivery) -> list[tuple[str, Outcome]]:
    """Have deliveries processed, without a source: each one's receipt and what became of it."""
    return [
        (settlement.delivery.receipt, settlement.outcome)
        for settlements in worker._processor.process(deliveries)
        for settlement in settlements
    ]
