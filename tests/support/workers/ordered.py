"""Workers that keep order over dead letters, deliveries of a key, and which letters wait."""

from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from support.workers.business import apply
from support.workers.memory_worker import delivery, make, process
from support.workers.paid import delivered
from txbox import DeadLetter, DeadLetters, Message, Outcome, OutOfOrder
from txbox_workers.delivery import Delivery
from txbox_workers.memory_source import MemorySource
from txbox_workers.worker import Worker


def ordered(engine: Engine, handler: Any = apply, **options: Any) -> Worker:
    return make(MemorySource(), engine, handler, **{"ordered": True, "max_attempts": 1, **options})


def failing(*ids: str) -> Callable[[Session, Message], None]:
    """A handler that fails for these messages, each time."""

    def handler(session: Session, message: Message) -> None:
        apply(session, message)
        if message.id in ids:
            raise ValueError("not yet")

    return handler


def in_group(message_id: str, group: str | None = "g", *, receive_count: int = 1) -> Delivery:
    return delivery(message_id, group=group, receive_count=receive_count)


def with_key(message_id: str, key: str = "g", *, receive_count: int = 1) -> Delivery:
    return delivered(Message(message_id, f"body of {message_id}".encode(), {"key": key}), receive_count=receive_count)


def outcomes(worker: Worker, *deliveries: Delivery) -> dict[str, Outcome]:
    return {receipt.rpartition("-")[0]: outcome for receipt, outcome in process(worker, *deliveries)}


def park_m1(engine: Engine, make_delivery: Callable[..., Delivery] = in_group) -> None:
    assert outcomes(ordered(engine, failing("m1")), make_delivery("m1")) == {"m1": Outcome.DEAD}


def waiting(engine: Engine) -> dict[str, str]:
    """The letters that wait, by message, in the order of their places, with their reasons."""
    letters = [letter for letter in DeadLetters(engine).list() if letter.order_position is not None]
    return {each.message_id: each.reason.value for each in sorted(letters, key=lambda each: each.order_position or 0)}


def by_key(order: list[str]) -> dict[str, list[str]]:
    """The ids of messages by their keys, which their ids begin with, in order."""
    found: dict[str, list[str]] = defaultdict(list)
    for message_id in order:
        found[message_id.partition("-")[0]].append(message_id)
    return found


def redrive(engine: Engine, send: Callable[[DeadLetter], None] = lambda _: None) -> list[str]:
    """Redrive all that wait, by their places; a copy that fails meanwhile keeps back those behind it."""
    sent: list[str] = []
    letters = DeadLetters(engine)
    for letter in sorted(letters.list(), key=lambda each: each.order_position or 0):
        with suppress(OutOfOrder):
            letters.redrive(letter.dead_letter_id or 0, lambda it: (sent.append(it.message_id), send(it))[1])
    return sent
