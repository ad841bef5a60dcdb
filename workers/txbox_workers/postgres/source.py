"""The source of the messages that this database's own outbox has for a subscriber, ``inbox:SUBSCRIBER``.

One thread at a time looks: it finds what is new as a relay does (``txbox.relay.poller``), and reads it in bulk; all
take from that. A delivery is settled in the transaction that processes it::

    BEGIN ─ record ─ settle ── handler ── COMMIT          one round trip before the handler, one after it

So what has committed is not delivered again, whatever is killed when. What has failed waits in its row: for its time,
and with ``ordered`` at its place, before all others of its key. What a process was working on when it was killed may
have killed it: the highest position that may have been begun is written before it is begun, and what a successor finds
below it counts as delivered before.
"""

import json
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from sqlalchemy import Engine

from txbox import BrokerError, InvalidConfiguration, MalformedMessage, Message, Outcome
from txbox.dead_letters.failures import describe
from txbox.errors import RightsMissing
from txbox.messages.destinations import INBOX
from txbox.messages.message import HEADER_KEY, valid_subscriber_id
from txbox.outbox.lanes import lanes_of
from txbox.postgres.engines import require_server
from txbox.postgres.round_trip import Statement, Step
from txbox.postgres.sql import array_literal, moment
from txbox.postgres.sqlstates import DATABASE_ERRORS
from txbox.postgres.transactions import check_table, driver_cursor, short_transaction
from txbox.relay.sender import RelayStatements, array
from txbox.text import text_of
from txbox_workers.delivery import Delivery, Settlement
from txbox_workers.postgres.backlog import LaneBacklog, WaitingMessage
from txbox_workers.postgres.lane_claims import LaneClaims
from txbox_workers.postgres.lane_reader import IDLE_SECONDS, LaneReader
from txbox_workers.postgres.statements import LaneStatements

T = TypeVar("T")

VISIBILITY_SECONDS = 30
"""How long the claims of a worker last that is frozen or cut off. Those of one that is killed end with it."""

WAIT_SECONDS = 1.0
"""How long a ``receive`` waits when there is nothing."""

READ_MESSAGES = 500
READ_BATCHES = 20
MOST_READ_MESSAGES = 5_000
"""Messages that are read at once, at most: so many, or so many batches, but never more than these."""

CLAIM_SECONDS = 2.0
"""How often claims are shared anew while there are messages."""

RENEWAL_SECONDS = 4.0
"""How often while there are none."""

ACK_SECONDS = 1.0
"""After how long a message comes again whose row could not be deleted."""

ENDING_SECONDS = 5.0
"""How long, at most, until a thread ends whose connection was closed under it."""

DRAIN_SECONDS = 0.1
"""How often, while lanes are being released."""


class PostgresSource:
    """Delivers the messages for one subscriber from the outbox of its own database.

    Its worker must use the same engine, and tables of the same schema and prefix. ``PostgresWorker`` sees to that.
    """

    def __init__(
        self,
        engine: Engine,
        subscriber_id: str,
        *,
        schema: str | None = None,
        prefix: str = "",
        ordered: bool = False,
        batch_size: int = 10,
        visibility_seconds: float = VISIBILITY_SECONDS,
    ) -> None:
        """Make a source. It does not connect before ``open`` or ``receive``.

        Args:
            engine: one of psycopg.
            subscriber_id: whose messages.
            schema: the Postgres schema that holds the tables; None leaves it to the search path.
            prefix: what the tables' names start with.
            ordered: messages of one key are delivered in their order, also after one of them has failed.
            batch_size: deliveries per ``receive``, at most.
            visibility_seconds: how long the claims of a frozen or cut off worker last. Those of a killed one end at
                once.

        Raises:
            InvalidConfiguration: an argument cannot work.
        """
        if not 1 <= visibility_seconds <= 86_400:
            raise InvalidConfiguration(
                f"PostgresWorker.visibility_seconds must be from 1 to 86,400, not {visibility_seconds!r}"
            )
        self._name = INBOX + valid_subscriber_id(subscriber_id, "subscriber_id")
        self._engine = engine
        self._ordered = ordered
        self._batch_size = batch_size
        self._read_messages = min(max(READ_MESSAGES, READ_BATCHES * batch_size), MOST_READ_MESSAGES)
        self._visibility_seconds = visibility_seconds
        self._statements = LaneStatements.load(schema, prefix)
        self._relay = RelayStatements.load(schema, prefix)
        self._lanes = lanes_of(self._name)
        self.keeps_batches = ordered
        """What one ``receive`` returns must not be mixed with others: a slow key would delay them."""
        self._settle = Statement.of(self._statements.settle)
        self._plan_by_place = Step(Statement.of(self._statements.plan_by_place))
        self.call: Callable[[Callable[[], Any]], Any] = lambda work: work()
        """Calls what uses the engine. A worker of an event loop sets it before it starts."""
        self._changed = threading.Condition()
        self._is_looking = False
        self._places: dict[str, WaitingMessage] = {}
        self._process, self._number = secrets.token_hex(4), 0  # for receipts, which no other process may give
        self._reset()

    def _reset(self) -> None:
        self._claims = LaneClaims(
            self._engine, self._statements, self._relay, self._lanes, idle_seconds=self._visibility_seconds
        )
        self._backlog = LaneBacklog(ordered=self._ordered, ahead=self._batch_size)
        self._gained: set[int] = set()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._claimer: threading.Thread | None = None
        self._asked_at = self._shared_at = -math.inf  # when a receive came last, and when claims were shared last
        self._busy = False  # messages have come since then, of these lanes or others
        self._reader: LaneReader | None = None
        self._server: str | None = None  # which run of which server has answered
        self._settled: set[str] = set()

    @property
    def name(self) -> str:
        """The destination, ``inbox:SUBSCRIBER``."""
        return self._name

    @property
    def visibility_seconds(self) -> float | None:
        """How long a frozen worker's deliveries are its own."""
        return self._visibility_seconds

    @property
    def is_async(self) -> bool:
        """Whether its engine works on an event loop only."""
        return self._engine.dialect.is_async

    # --- start and end ------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Raise unless the tables exist and this user may read and settle messages.

        Raises:
            SchemaMissing, RightsMissing, InvalidConfiguration: it cannot be used like this.
            BrokerError: the database does not answer.
        """
        with self._errors():
            self.call(self._check)

    def _check(self) -> None:
        sql = self._statements
        with short_transaction(self._engine) as connection:
            require_server(connection)
            check_table(connection, sql.tables.outbox_message)
            check_table(connection, sql.tables.inbox_lane)
            outbox, lane = sql.name_of("outbox_message"), sql.name_of("inbox_lane")
            needed = [(outbox, right) for right in ("SELECT", "INSERT", "UPDATE", "DELETE")]
            needed += [(lane, right) for right in ("SELECT", "INSERT", "UPDATE")]
            asked = {"tables": [name for name, _ in needed], "rights": [right for _, right in needed]}
            for name, rights in connection.exec_driver_sql(self._relay.missing_rights, asked):
                raise RightsMissing(name, rights)

    def close(self) -> None:
        """Release all claims and close the connections. What is in hand comes again, to any worker."""
        claimer, claims = self._claimer, self._claims
        with self._changed:
            self._closing.set()
            self._wake.set()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._is_looking, WAIT_SECONDS + IDLE_SECONDS)
            reader, self._reader = self._reader, None
        if claimer is not None:
            claimer.join(WAIT_SECONDS)
        if reader is not None:
            self._end(reader.close)
        with self._changed:
            self._backlog.drain(len(self._backlog.lanes))
            done = self._backlog.drained()
        self._unmark(done)
        self._end(claims.end)
        if claimer is not None:
            claimer.join(ENDING_SECONDS)  # what it has of the pool is given back before the engine is disposed of
        with self._changed:
            self._changed.wait_for(lambda: not self._is_looking, ENDING_SECONDS)
            self._places.clear()
            self._reset()

    def _end(self, close: Callable[[], None]) -> None:
        try:
            self.call(close)
        except Exception as error:  # noqa: BLE001 - it ends with the process
            _log.debug("%s: a connection could not be closed: %s", self._name, error)

    def _start(self) -> None:
        """Start the thread that claims, unless it runs. The lock is held."""
        if self._claimer is None:
            self._claimer = threading.Thread(
                target=self._keep_claims, args=(self._closing, self._claims), name="txbox-claims", daemon=True
            )
            self._claimer.start()

    # --- receiving ----------------------------------------------------------------------------------------------------

    def receive(self) -> Sequence[Delivery]:
        """Return the next deliveries. Messages of one key come in order."""
        deadline = time.monotonic() + WAIT_SECONDS
        with self._changed:
            self._start()
            try:
                while True:
                    self._asked_at = now = time.monotonic()
                    if rows := self._backlog.take(self._batch_size):
                        return [self._delivery(row) for row in rows]
                    if self._closing.is_set() or now >= deadline:
                        return []
                    if self._is_looking:
                        self._changed.wait(deadline - now)
                        continue
                    self._is_looking = True
                    self._changed.release()
                    try:
                        self._look(deadline)
                    finally:
                        self._changed.acquire()
                        self._is_looking = False
            finally:
                self._changed.notify()  # one other takes what is left, or looks

    def _look(self, deadline: float) -> None:
        """Read what there is; if there is nothing, wait for something. One thread at a time, without the lock."""
        closing = self._closing
        try:
            with self._errors():
                if self._reader is None:
                    self._reader = self.call(
                        lambda: LaneReader(self._engine, self._statements, self._relay, self._lanes)
                    )
                    if closing.is_set():
                        raise BrokerError(f"{self._name}: closed meanwhile")
                self._wake.clear()
                if not self.call(self._read):
                    self._reader.pause(deadline, self._backlog.next_due(), self._wake, self.call)
        except BaseException:
            reader, self._reader = self._reader, None
            if reader is not None:
                try:
                    self.call(reader.close)
                except Exception as error:  # noqa: BLE001 - the first error says more
                    _log.debug("%s: a connection could not be closed: %s", self._name, error)
            with self._changed:  # what was found before may be another server's
                self._gained = set(self._claims.owned)
                self._backlog.lose(set(self._backlog.lanes))
            raise

    def _read(self) -> bool:
        """Read what is due and what is new; return whether there was something."""
        reader, backlog = self._reader, self._backlog
        assert reader is not None  # noqa: S101 - for the type checker
        self._take_over(reader)
        now = time.monotonic()
        with self._changed:
            again = backlog.due(now, self._read_messages)
        if again:
            rows = reader.read_again(again)
            with self._changed:
                backlog.fetched(again, rows, now)
        found = reader.find_if_due(now)
        with self._changed:
            if found is not None:
                if found.server != self._server and self._server is not None:  # what was read may not be there
                    self._gained = set(self._claims.owned)
                    backlog.lose(set(backlog.lanes))
                    self._wake.set()
                self._server = found.server
                backlog.found(found.fresh)
                self._busy |= bool(found.fresh)
            wanted, lanes = backlog.to_read(), set(backlog.lanes)
        if found is not None and found.due:
            heads = reader.heads(found.due & set(self._backlog.lanes))
            with self._changed:
                backlog.wake([(lane, position, key) for lane, position, key, due_in in heads if due_in <= 0], now)
        if not wanted:
            return bool(again)
        each_limit = max(self._read_messages // len(wanted), 1)
        rows, cut = reader.read(wanted, each_limit)
        if rows:
            reader.mark_begun(rows, lanes | wanted.keys())
        with self._changed:
            backlog.read(wanted, rows, each_limit=each_limit, cut=cut, now=now)
        return True

    def _take_over(self, reader: LaneReader) -> None:
        with self._changed:
            gained = self._gained
            self._gained = set()
        if not gained:
            return
        origins = reader.origins(gained)
        with self._changed:
            self._backlog.add({lane: origin for lane, origin in origins.items() if lane in self._claims.owned})

    def _delivery(self, row: WaitingMessage) -> Delivery:
        """Return a message in hand as a delivery. The lock is held."""
        self._number += 1
        receipt = f"{row.position}-{self._process}-{self._number}"
        self._places[receipt] = row
        headers, problem = _headers(row.headers)
        message_id = row.message_id
        if not message_id:
            message_id = f"position {row.position}"
            problem = MalformedMessage("a row of the outbox has no message id")
        if row.key is not None:
            headers[HEADER_KEY] = row.key
        count = row.attempts + self._backlog.returns(row.position) + 1
        return Delivery(
            Message(message_id, row.body, headers, self._name, moment(row.published_at)),
            receipt=receipt,
            receive_count=max(count, 2) if self._backlog.is_suspect(row) else count,
            body=row.body,
            envelope={"key": row.key},
            problem=problem,
        )

    # --- settling -----------------------------------------------------------------------------------------------------

    def settling(self, deliveries: Sequence[Delivery]) -> Sequence[Step]:
        """Return the statements that settle deliveries; they are sent with BEGIN."""
        rows = [row for delivery in deliveries if (row := self._places.get(delivery.receipt)) is not None]
        settle = self._settle.with_values(
            places=array_literal([row.place for row in rows]),
            positions=array(row.position for row in rows),
            ids=array_literal([row.message_id for row in rows]),
        )
        return [self._plan_by_place, settle]

    def settled(self, deliveries: Sequence[Delivery]) -> None:
        """Note that deliveries were settled by a transaction that has committed."""
        now = time.monotonic()
        with self._changed:
            for delivery in deliveries:
                if (row := self._places.pop(delivery.receipt, None)) is not None:
                    self._backlog.settle(row.position, now)
                    self._settled.add(delivery.receipt)
            self._note_due()

    def ack(self, deliveries: Sequence[Delivery]) -> Collection[str]:
        """Delete the messages that no transaction has settled. If that fails, they come again."""
        with self._changed:
            done = {delivery.receipt for delivery in deliveries} & self._settled
            self._settled -= done
            rows = {
                delivery.receipt: row
                for delivery in deliveries
                if (row := self._places.get(delivery.receipt)) is not None
            }
        if rows:
            is_deleted = False
            try:
                with self._errors():
                    self.call(lambda: self._run(self._statements.delete_messages, **_places(rows.values())))
                is_deleted = True
            finally:
                now = time.monotonic()
                with self._changed:
                    for receipt, row in rows.items():
                        self._places.pop(receipt, None)
                        if is_deleted:
                            self._backlog.settle(row.position, now)
                        else:
                            self._backlog.hand_back(row.position, now + ACK_SECONDS, now)
                    self._note_due()
        return done | rows.keys()

    def hand_back(self, settlements: Sequence[Settlement]) -> None:
        """Deliver again after each settlement's delay.

        What has failed is counted in its row. What was begun and has no outcome is counted here: if it loses its
        connection each time, it must not take others with it. What was not begun is not counted.
        """
        with self._changed:
            back = [
                (settlement, row)
                for settlement in settlements
                if (row := self._places.get(settlement.delivery.receipt)) is not None
            ]
        failed = [(settlement, row) for settlement, row in back if settlement.outcome is Outcome.FAILED]
        waits_here = {row.position for _, row in back}
        counted: set[int] = set()
        try:
            if failed:
                with self._errors():
                    self.call(lambda: self._postpone(failed))
                counted = {row.position for _, row in failed}
                waits_here -= {row.position for _, row in failed if not self._ordered or row.key is None}
        finally:
            now = time.monotonic()
            with self._changed:
                self._settled -= {settlement.delivery.receipt for settlement in settlements}
                for settlement, row in back:
                    self._places.pop(settlement.delivery.receipt, None)
                    if row.position in waits_here:
                        counts = settlement.error is not None and row.position not in counted
                        self._backlog.hand_back(row.position, now + settlement.delay_seconds, now, counts=counts)
                    else:  # it is found when it is due
                        self._backlog.settle(row.position, now)
                self._note_due()

    def _postpone(self, failed: Sequence[tuple[Settlement, WaitingMessage]]) -> None:
        self._run(
            self._statements.postpone_messages,
            **_places(row for _, row in failed),
            attempts=array(row.attempts + 1 for _, row in failed),
            errors=[None if one.error is None else describe(one.error) for one, _ in failed],
            pauses=f"{{{','.join(str(one.delay_seconds) for one, _ in failed)}}}",
            ordered=self._ordered,
        )

    def _run(self, statement: str, **values: Any) -> None:
        with short_transaction(self._engine) as connection, driver_cursor(connection) as cursor:
            cursor.execute(self._relay.set_plan)
            cursor.execute(statement, values)

    def extend_visibility(self, deliveries: Sequence[Delivery], seconds: float) -> Mapping[str, str]:  # noqa: ARG002 - protocol
        """Do nothing: a process renews its claims for as long as it runs."""
        return {}

    def _note_due(self) -> None:
        """Wake the thread that looks if something is due. The lock is held."""
        if self._backlog.next_due() <= time.monotonic():
            self._wake.set()

    # --- claims -------------------------------------------------------------------------------------------------------

    def _keep_claims(self, closing: threading.Event, claims: LaneClaims) -> None:
        """Claim lanes and release others until the source is closed. This is the body of a thread."""
        failures = 0
        while not closing.is_set():
            pause = longest = min(CLAIM_SECONDS, self._visibility_seconds / 3)
            try:
                if self._must_share(claims) and self._share(claims):
                    pause = DRAIN_SECONDS
                failures = 0
            except BaseException as error:  # noqa: BLE001 - without claims nothing is delivered
                if closing.is_set():  # the source may have begun anew, with other claims
                    break
                failures += 1
                if failures == 1:
                    _log.warning("%s: the claims are lost, and are taken again: %s", self._name, text_of(error))
                try:
                    self.call(claims.close)
                except Exception:  # noqa: BLE001 - it is closed all the same
                    _log.debug("%s: the session of the claims could not be closed", self._name)
                with self._changed:  # after the close: the thread that looks adds what it finds in ``owned``
                    self._backlog.lose(set(self._backlog.lanes))
                    self._gained.clear()
                pause = min(longest, 0.1 * 2**failures)
            closing.wait(pause)

    def _unmark(self, lanes: Mapping[int, int]) -> None:
        """Note that nothing of lanes that are about to be released is in progress here."""
        if not lanes:
            return
        if (reader := self._reader) is not None:
            reader.unmarked(lanes)
        try:
            self.call(lambda: self._run(self._statements.unmark, lanes=[*lanes], marks=[*lanes.values()]))
        except DATABASE_ERRORS as error:  # what is in them is processed one by one, and no more
            _log.debug("%s: the mark of released lanes could not be taken back: %s", self._name, text_of(error))

    def _must_share(self, claims: LaneClaims) -> bool:
        """Whether messages have come, or the claims must be renewed."""
        busy, self._busy = self._busy, False
        renewal = min(RENEWAL_SECONDS, self._visibility_seconds / 3)
        late = time.monotonic() - self._shared_at >= renewal
        return busy or late or claims.surplus > 0 or claims.joined != self._wants()

    def _wants(self) -> bool:
        return time.monotonic() - self._asked_at < WAIT_SECONDS + CLAIM_SECONDS

    def _share(self, claims: LaneClaims) -> bool:
        """Renew the claims, once; return whether lanes are being released."""
        with self._changed:
            wants = self._wants()
            released = set(sorted(self._gained)[: claims.surplus])  # not begun yet
            self._gained -= released
            self._backlog.drain(claims.surplus - len(released))
            drained = self._backlog.drained()
            released |= drained.keys()
            idle = None
            if not (wants or self._is_looking):
                idle, self._reader = self._reader, None
        if idle is not None:  # the server keeps every notification until a session that listens has read it
            self.call(idle.close)
        self._unmark(drained)
        before = claims.owned - released
        self.call(lambda: claims.work(wants=wants, released=released))
        self._shared_at = time.monotonic()
        with self._changed:
            gained = claims.owned - before
            if gained:
                self._gained |= gained
                self._wake.set()
        return claims.surplus > 0

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except DATABASE_ERRORS as error:
            raise BrokerError(f"{self._name}: the database cannot be used: {text_of(error)}") from error


def _headers(text: str) -> tuple[dict[str, str], MalformedMessage | None]:
    if text == "{}":  # most have none, and this is asked for each message
        return {}, None
    headers = json.loads(text)
    if isinstance(headers, dict) and all(isinstance(value, str) for value in headers.values()):
        return {name.lower(): value for name, value in headers.items()}, None
    return {}, MalformedMessage(f"the headers of an outbox message are text by name, not {text[:100]}")


def _places(rows: Collection[WaitingMessage] | Iterator[WaitingMessage]) -> dict[str, str]:
    rows = list(rows)
    return {"lanes": array(row.lane for row in rows), "positions": array(row.position for row in rows)}


_log = logging.getLogger("txbox.worker")
