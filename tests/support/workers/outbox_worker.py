"""A ``PostgresWorker`` in the place of a ``Worker``: the tests of the one are those of the other.

What a test puts into its ``MemorySource`` is published to ``inbox:<subscriber>`` of the worker that the source is given
to. What a test gives to the processor by hand is in the outbox, too; it is settled as its outcome says, and then the
outbox has what it must have.
"""

import copy
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, make_url

from support.workers import ledger_worker, memory_worker, ordered
from txbox import Message, Outbox, Outcome, Outgoing
from txbox.messages.destinations import INBOX
from txbox.messages.message import HEADER_KEY
from txbox.relay import poller
from txbox_workers import memory_source
from txbox_workers.delivery import Delivery, Settlement
from txbox_workers.options import BATCH_SIZE
from txbox_workers.postgres import PostgresSource, source
from txbox_workers.postgres.backlog import WaitingMessage
from txbox_workers.worker import Worker

ROWS = """
SELECT lane, position, ctid::text, transaction_id::text::bigint, message_id, body, key, headers::text, attempts, 0,
  NULL
FROM {} WHERE destination = %(destination)s AND message_id = %(id)s ORDER BY position"""


class OutboxSource(PostgresSource):
    """Looks like a ``MemorySource``."""

    def __init__(
        self,
        messages: Iterable[Message] = (),
        *,
        batch_size: int | None = None,
        wait_seconds: float = 0.0,
        name: str = "memory",
    ) -> None:
        self._name = name
        self.wanted_size = batch_size or BATCH_SIZE
        self._condition = threading.Condition()
        self._unpublished = list(messages)
        self._publisher: _Publisher | None = None
        self._copies: list[OutboxSource] = []
        self._delivered: set[str] = set()

    def of_worker(self, options: dict[str, Any], batch_size: int) -> "OutboxSource":
        """Return the source of a worker with these options: this one for the first, and a copy for each other one."""
        first = self._publisher is None
        own = self if first else copy.copy(self)
        inbox, engine = options["inbox"], options["engine"]
        own._publisher = _Publisher(engine, inbox)
        PostgresSource.__init__(
            own,
            engine,
            inbox.subscriber_id,
            schema=inbox.schema,
            prefix=inbox.prefix,
            ordered=bool(options.get("ordered")),
            batch_size=batch_size,
        )
        own._delivered = set()
        self._copies.append(own)
        _sources.append(own)
        if first:
            unpublished, self._unpublished = self._unpublished, []
            own._publisher.publish(unpublished)
        return own

    def send(self, message: Message) -> None:
        if self._publisher is None:
            self._unpublished.append(message)
        else:
            self._publisher.publish([message])

    def wait_until_empty(self, timeout: float) -> bool:
        until = time.monotonic() + timeout
        while time.monotonic() < until:
            in_hand = any(one._places or one._settled for one in self._copies)
            if not in_hand and not self._ready:
                return True
            time.sleep(0.01)
        return False

    @property
    def _ready(self) -> list[int]:
        return [] if self._publisher is None else self._publisher.positions()

    @property
    def _taken(self) -> dict[str, WaitingMessage]:
        return self._places

    def _delivery(self, row: WaitingMessage) -> Delivery:
        delivery = super()._delivery(row)
        self._delivered.add(delivery.receipt)
        return delivery

    # --- what a test gives to the processor by hand -------------------------------------------------------------------

    def process(
        self, process: Callable[[Sequence[Delivery]], Iterator[list[Settlement]]], deliveries: Sequence[Delivery]
    ) -> Iterator[list[Settlement]]:
        given = [delivery for delivery in deliveries if delivery.receipt not in self._delivered]
        if given:
            with _choosing:
                for delivery in given:
                    self._places[delivery.receipt] = self._row_of(delivery)
        try:
            for settlements in process(deliveries):
                yield settlements
                for settlement in settlements:
                    if settlement.delivery in given:
                        self._settle_by_hand(settlement)
        finally:
            for delivery in given:
                self._places.pop(delivery.receipt, None)

    def _row_of(self, delivery: Delivery) -> WaitingMessage:
        """Return the row of a message that is in nobody's hand; publish it if there is none."""
        publisher, message = self._publisher, delivery.message
        assert publisher is not None
        in_hand = {row.position for one in _sources for row in one._places.values()}
        for _ in range(2):
            for row in publisher.rows(message.id):
                if row.position not in in_hand and row.body == message.body:
                    return row
            publisher.publish([message])
        raise AssertionError(f"{message.id} cannot be found")

    def _settle_by_hand(self, settlement: Settlement) -> None:
        delivery, outcome = settlement.delivery, settlement.outcome
        row = self._places.get(delivery.receipt)
        was_settled = delivery.receipt in self._settled
        assert was_settled is (row is None), "it is settled or in hand"
        if outcome is Outcome.PROCESSED:
            assert was_settled, "its transaction settles it"
        elif outcome not in (Outcome.DUPLICATE, Outcome.DEAD):
            assert not was_settled, "its transaction was rolled back"
        if row is not None:
            assert self._is_there(row)
        if outcome.acked:
            assert self.ack([delivery]) == {delivery.receipt}
            assert row is None or not self._is_there(row)
        else:
            with _choosing:  # another source may take it next
                self.hand_back([settlement])
                assert row is not None
                assert self._is_there(row)

    def _is_there(self, row: WaitingMessage) -> bool:
        assert self._publisher is not None
        return row.position in {one.position for one in self._publisher.rows(row.message_id)}


class OutboxWorker(Worker):
    """A ``PostgresWorker`` of the source that a test has."""

    _of = "Worker"

    def __init__(self, source: OutboxSource, **options: Any) -> None:
        size = options.get("batch_size", source.wanted_size)
        if options.get("prefetch"):
            options["batch_size"], size = size, min(size, BATCH_SIZE)
        else:
            options.pop("batch_size", None)
        super().__init__(source.of_worker(options, size), **options)
        process, own = self._processor.process, self.source
        assert isinstance(own, OutboxSource)
        setattr(self._processor, "process", lambda deliveries: own.process(process, deliveries))  # noqa: B010


class _Publisher:
    """Publishes to a worker's subscriber, and reads what waits, not through the proxy of a test."""

    def __init__(self, engine: Engine, inbox: Any) -> None:
        url = engine.url
        if _direct and (direct := make_url(_direct[-1])).port != url.port:
            url = direct
        self._engine = _engine(url.render_as_string(hide_password=False))
        self._outbox = Outbox(schema=inbox.schema, prefix=inbox.prefix)
        self._destination = f"{INBOX}{inbox.subscriber_id}"
        self._table = self._outbox._statements.name_of("outbox_message")

    def publish(self, messages: Sequence[Message]) -> None:
        if not messages:
            return
        with self._engine.begin() as connection:
            self._outbox.publish_many(connection, [self._outgoing(message) for message in messages])
            for message in messages:
                if message.sent_at is not None:
                    connection.exec_driver_sql(
                        f"UPDATE {self._table} SET published_at = %s WHERE message_id = %s",
                        (message.sent_at, message.id),
                    )

    def _outgoing(self, message: Message) -> Outgoing:
        headers = {name: value for name, value in message.headers.items() if name != HEADER_KEY}
        return Outgoing(self._destination, message.body, message.headers.get(HEADER_KEY), headers, message.id)

    def positions(self) -> list[int]:
        statement = f"SELECT position FROM {self._table} WHERE destination = %s LIMIT 100"
        with self._engine.connect() as connection:
            return list(connection.exec_driver_sql(statement, (self._destination,)).scalars())

    def rows(self, message_id: str) -> list[WaitingMessage]:
        with self._engine.connect() as connection:
            found = connection.exec_driver_sql(
                ROWS.format(self._table), {"destination": self._destination, "id": message_id}
            )
            return [WaitingMessage._make(row) for row in found]


_direct: list[str] = []
_engines: dict[str, Engine] = {}
_sources: list[OutboxSource] = []
_rebased: list[type] = []
_choosing = threading.Lock()


def _engine(url: str) -> Engine:
    if url not in _engines:
        _engines[url] = create_engine(url, pool_size=1, connect_args={"prepare_threshold": None})
    return _engines[url]


def replace_workers(patch: pytest.MonkeyPatch, module: Any, schema_url: str | None) -> None:
    """Have a test module, and what makes workers for it, make these; ``schema_url`` leads past proxies."""
    patch.setattr(source, "CLAIM_SECONDS", 0.2)  # what one worker leaves, the next one takes
    patch.setattr(source, "RENEWAL_SECONDS", 0.2)
    patch.setattr(source, "WAIT_SECONDS", 0.02)  # a stop waits for that
    patch.setattr(poller, "DUE_SECONDS", 0.01)  # so does each failure
    if schema_url is not None:
        _direct.append(schema_url)
    for one in (memory_worker, ledger_worker, ordered, module):
        for name, kind in (("Worker", OutboxWorker), ("MemorySource", OutboxSource)):
            if hasattr(one, name):
                patch.setattr(one, name, kind)
    for one in vars(module).values():
        if isinstance(one, type) and memory_source.MemorySource in one.__bases__:
            one.__bases__ = (OutboxSource,)
            _rebased.append(one)


def dispose() -> None:
    """Close the connections over which a test has published, and undo what no ``MonkeyPatch`` can."""
    while _rebased:
        _rebased.pop().__bases__ = (memory_source.MemorySource,)
    _direct.clear()
    _sources.clear()
    while _engines:
        _engines.popitem()[1].dispose()
