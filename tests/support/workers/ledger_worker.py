"""Workers with a ledger that are fed from memory, and leases that run out when a test says so."""

from collections.abc import Callable
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from support.workers.business import apply
from support.workers.memory_worker import AT_ONCE
from txbox import DeadLetters, Inbox, Message
from txbox.leases import Lease, PostgresLedger
from txbox_workers.memory_source import MemorySource
from txbox_workers.worker import Worker


def make(source: MemorySource, ledger: PostgresLedger, handler: Any, engine: Engine | None, **options: Any) -> Worker:
    if engine is not None:
        options |= {"engine": engine} if "inbox" in options else {"dead_letters": DeadLetters(engine)}
    return Worker(source, ledger=ledger, handler=handler, **{"backoff": AT_ONCE, **options})


def beside(engine: Engine, ledger: PostgresLedger, handler: Any, **options: Any) -> Worker:
    return make(MemorySource(), ledger, handler, engine, inbox=Inbox("mailing", wait_seconds=0.2), **options)


def noting(seen: list[tuple[int, int]], then: Callable[[Session, int], object] = lambda session, run: None) -> Any:
    """A handler beside an inbox that notes its attempt and the unknown ones, applies, and calls then(session, run)."""

    def handle(session: Session, message: Message, lease: Lease) -> None:
        seen.append((lease.attempt, lease.unknown_attempts))
        apply(session, message)
        then(session, len(seen))

    return handle


def expire(engine: Engine, message_id: str) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "UPDATE message_lease SET expires_at = clock_timestamp() WHERE message_id = %s AND expires_at IS NOT NULL",
            (message_id,),
        )
