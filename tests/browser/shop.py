"""What a shop's messaging looks like on a day with some trouble: made by the library, its past by statements."""

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from support.postgres.statements import run
from support.txbox.outbox import publish
from support.txbox.publishers import RecordingPublisher
from support.waiting import wait_until
from support.workers.memory_worker import at_work
from txbox import DeadLetter, DeadLetters, Inbox, Message, Outgoing, Reason
from txbox.backoff import Backoff
from txbox.maintenance import Maintainer, Retention
from txbox.operations.actions import note_action
from txbox.operations.pauses import pause
from txbox.relay import OutboxMessage, Relay
from txbox_workers.memory_source import MemorySource
from txbox_workers.worker import Worker

ORDER = "order-48913"
RUN = "7f3a91c0d2e4"
RETRY = Backoff(first_seconds=600.0, longest_seconds=600.0)
"""What has failed waits for as long as the pages are looked at."""


@contextmanager
def open_shop(engine: Engine) -> Iterator[None]:
    """Fill a schema; workers and a relay are at work meanwhile."""
    with ExitStack() as open_:
        _past(engine)
        sources, workers = zip(
            _worker(engine, "billing", 240),
            _worker(engine, "mailing", 90),
            _worker(engine, "analytics", 400),
            strict=True,
        )
        relay = Relay(engine, {"orders": RecordingPublisher(), "returns": RecordingPublisher(_full)})
        publish(engine, *(Outgoing("orders:new", f'{{"order": {n}}}', key=f"customer-{n % 7}") for n in range(60)))
        publish(engine, *(Outgoing("returns:warehouse", "{}", key=f"customer-{n % 3}") for n in range(9)))
        publish(engine, *(Outgoing("erp:invoices", "{}") for _ in range(14)))
        open_.enter_context(at_work(*workers, relay))
        wait_until(lambda: _count(engine, "processed_message") >= 725, "the workers' messages")
        wait_until(lambda: _count(engine, "outbox_message WHERE held") >= 9, "what is held")
        for worker in workers:
            open_.callback(worker.stop, 0)
        _trouble(engine)
        over = threading.Event()
        feeder = threading.Thread(target=_feed, args=(sources, over), name="feeder")
        open_.callback(feeder.join)
        open_.callback(over.set)
        feeder.start()
        busy = "worker_report WHERE per_second::text ~ '[1-9]' AND oldest_sent_at IS NOT NULL"
        wait_until(lambda: _count(engine, busy) == len(workers), "the workers' reports")
        yield


def _feed(sources: Sequence[MemorySource], over: threading.Event) -> None:
    """Have messages come while pages are looked at, of subscriber after subscriber."""
    for number in itertools.count():
        if over.wait(0.02):
            return
        sent_at = datetime.now(UTC) - timedelta(milliseconds=300 + number % 7 * 90)
        sources[number % len(sources)].send(Message(f"live-{number}", b"{}", {"tenant": "north"}, sent_at=sent_at))


def _worker(engine: Engine, subscriber_id: str, messages: int) -> tuple[MemorySource, Worker]:
    def handle(_session: Session, message: Message) -> None:
        if message.id.endswith("7-retry"):
            raise TimeoutError("the card service did not answer within 2 s")

    ids = [f"order-{48000 + number}" for number in range(messages)]
    again = ids[:: 25 if subscriber_id == "billing" else 60]
    failing = [f"order-{48500 + number}7-retry" for number in range(3)] if subscriber_id == "billing" else []
    source = MemorySource([Message(one, b"{}", {"tenant": "north"}) for one in [*ids, *again, *failing]])
    worker = Worker(source, engine=engine, inbox=Inbox(subscriber_id), handler=handle, backoff=RETRY, max_attempts=5)
    return source, worker


def _full(message: OutboxMessage) -> str:
    return f"the queue of {message.destination.partition(':')[2]} is full"


def _count(engine: Engine, rows: str) -> int:
    with engine.connect() as connection:
        return int(connection.exec_driver_sql(f"SELECT count(*) FROM {rows}").scalar_one())


def _past(engine: Engine) -> None:
    """What workers have reported in the last three hours: quiet, then a rush, and failures while a service was away."""
    figures: Sequence[tuple[str, str, str]] = (
        (
            "billing",
            "processed",
            "round(900 + 300 * sin(n / 14.0) + mod(n * 37, 90) + CASE WHEN n < 40 THEN 500 ELSE 0 END)",
        ),
        ("billing", "duplicate", "20 + mod(n * 13, 17)"),
        ("billing", "failed", "CASE WHEN n BETWEEN 50 AND 62 THEN 80 + mod(n * 7, 31) ELSE mod(n, 3) END"),
        ("mailing", "processed", "round(500 + 200 * sin(n / 20.0) + mod(n * 29, 70))"),
        ("mailing", "duplicate", "5 + mod(n * 11, 9)"),
        ("analytics", "processed", "2400 + mod(n * 41, 260)"),
    )
    for name, figure, count in figures:
        run(
            engine,
            "INSERT INTO reported_activity (kind, name, minute, figure, count) SELECT 'subscriber', %s, "
            f"date_trunc('minute', now()) - n * interval '1 minute', %s, {count} FROM generate_series(1, 185) AS n",
            (name, figure),
        )
    for kind, name, figure, count in (
        ("outbox", "", "sent", "1800 + round(400 * sin(n / 14.0))"),
        ("outbox", "", "failed", "mod(n, 4)"),
        ("destination", "orders:new", "sent", "1300 + round(300 * sin(n / 14.0))"),
        ("destination", "returns:warehouse", "sent", "120 + mod(n * 17, 40)"),
        ("destination", "erp:invoices", "sent", "CASE WHEN n > 9 THEN 380 + round(100 * sin(n / 14.0)) ELSE 0 END"),
    ):
        run(
            engine,
            "INSERT INTO reported_activity (kind, name, minute, figure, count) SELECT %s, %s, "
            f"date_trunc('minute', now()) - n * interval '1 minute', %s, {count} FROM generate_series(1, 185) AS n",
            (kind, name, figure),
        )


def _trouble(engine: Engine) -> None:
    letters: Sequence[tuple[str, str, str, Reason, str]] = (
        ("order-48044", "mailing", "180", Reason.MISMATCH, "the same id has come with another body"),
        ("order-47777", "billing", "77", Reason.CRASHED, "its worker ended with signal 9 while it had it, 5 times"),
        ("order-48890", "billing", "61", Reason.FAILED, "ValueError: the card was declined: expired"),
        (ORDER, "billing", "42", Reason.FAILED, "ValueError: the card was declined: insufficient funds"),
        ("order-48902", "mailing", "9", Reason.FAILED, "SMTPRecipientsRefused: 550 no such mailbox"),
    )
    for message_id, subscriber_id, minutes, reason, error in letters:
        with engine.begin() as connection:
            number = DeadLetters(engine).park_in(
                connection,
                DeadLetter(
                    subscriber_id=subscriber_id, message_id=message_id, reason=reason, error=error, attempts=5,
                    source="orders", body=b'{"order": 1}', headers={"tenant": "north"}, envelope={},
                ),
            )  # fmt: skip
        run(
            engine,
            "UPDATE dead_letter SET parked_at = now() - %s * interval '1 minute' WHERE dead_letter_id = %s",
            (int(minutes), number),
        )
    run(
        engine,
        "INSERT INTO message_lease (subscriber_id, message_id, fence, attempts, failures, owner, acquired_at, "
        "expires_at, completed_at) SELECT 'payouts', 'payout-' || 900 + n, n, 1 + mod(n, 3), 0, 'pay-' || mod(n, 4) || "
        "' (pid ' || 310 + n || ')', now() - n * interval '9 s', CASE WHEN n < 6 THEN now() + interval '1 hour' "
        "WHEN n < 8 THEN now() - interval '40 s' END, CASE WHEN n > 11 THEN now() - n * interval '5 s' END "
        "FROM generate_series(1, 60) AS n",
    )
    run(
        engine,
        "INSERT INTO bulk_load (run_id, subscriber_id, source, digest, writer, chunks, bounds, rows_read, started_at, "
        "finished_at) VALUES (%s, 'billing', 's3://shop-archive/orders-2026-11.jsonl', '', 'copy', 160, '[]', "
        "1600000, now() - interval '14 minutes', NULL), ('30b8cc19a6f5', 'analytics', "
        "'s3://shop-archive/clicks.jsonl', '', 'copy', 12, '[]', 120000, now() - interval '2 days', "
        "now() - interval '2 days' + interval '95 s')",
        (RUN,),
    )
    run(
        engine,
        "INSERT INTO bulk_load_chunk (run_id, chunk, rows_read, rows_rejected, already_processed, applied, merged_at) "
        "SELECT %s, n, 10000, CASE WHEN mod(n, 41) = 7 THEN 12 ELSE 0 END, 600 + n, "
        "9400 - n - CASE WHEN mod(n, 41) = 7 THEN 12 ELSE 0 END, "
        "now() - (118 - n) * interval '7 s' FROM generate_series(0, 117) AS n "
        "UNION ALL SELECT '30b8cc19a6f5', n, 10000, 0, 0, 10000, "
        "now() - interval '2 days' + n * interval '8 s' FROM generate_series(0, 11) AS n",
        (RUN,),
    )
    Maintainer(engine, Retention({"*": timedelta(days=90), "analytics": timedelta(days=30)})).run_once()
    with engine.begin() as connection:
        counts = {"sent": 181_204, "processed": 181_199, "dead_letters": 5, "missing": 0}
        for name in ("billing", "mailing"):
            detail = {"balanced": True, "seconds": 3.2, "counts": counts}
            note_action(connection, "audit", name, by="cron", detail=detail)
        note_action(connection, "pause", "erp:invoices", by="maria", detail={"note": "the ERP is upgraded"})
    pause(engine, destination="erp:invoices", by="maria", note="the ERP is upgraded")
    run(engine, "ANALYZE")
