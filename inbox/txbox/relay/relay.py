"""The relay: moves messages from the outbox to their destinations.

One thread polls, and a few send::

    Poller ── lanes with messages ──→ Scheduler ── claims ──→ Sender: claim, read ──→ Dispatcher ──→ Publisher
                                          ↑                          settle ←── result ──┘
                                          └──────── result ────────────┘

Destinations that hang get senders of their own, as many as they need up to a limit (``txbox.relay.fair_share``).
Destinations with an async publisher share one sender, which waits for none of them (``txbox.relay.async_sender``).

Any number of relays may work on one outbox, without a link between them: the database decides which relay has which
lane, for one transaction at a time. A message is sent at least once. Messages of one key are sent in the order in which
they were published. A message is deleted after the broker has confirmed it; if a relay dies between the two, the
message is sent again under the same id.

The relay polls every few milliseconds for a second after it last found something or was notified
(``txbox.outbox.notifier``), for a moment more often after a single message, and about a hundred times a minute
otherwise.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import partial

from sqlalchemy import Connection, Engine, QueuePool

from txbox.backoff import Backoff
from txbox.dead_letters.dead_letters import DeadLetters
from txbox.errors import InvalidConfiguration, RightsMissing
from txbox.instrumentation import (
    BrokerLost,
    BrokerRestored,
    DatabaseLost,
    Drained,
    Event,
    Hook,
    Paused,
    PublisherOverdue,
    Relayed,
    Resumed,
    Stopped,
    emit,
)
from txbox.instrumentation.logs import log_event
from txbox.messages.destinations import INBOX, TOPIC
from txbox.outbox.lanes import number_of
from txbox.outbox.message_ids import new_message_id
from txbox.outbox.outbox import RELAY_SUBSCRIBER
from txbox.outbox.sent_messages import SentMessagesStatements, purge_sent
from txbox.postgres.engines import adopt, require_server
from txbox.postgres.transactions import check_table, short_transaction
from txbox.relay.async_publishers import EventLoop
from txbox.relay.async_sender import CONCURRENCY, AsyncSender
from txbox.relay.dispatcher import Dispatcher
from txbox.relay.poller import OutboxPoller, PausedDestination
from txbox.relay.publisher import AsyncPublisher, Publisher, is_async
from txbox.relay.reporter import RelayReporter
from txbox.relay.scheduler import DestinationChange, Scheduler
from txbox.relay.sender import ClaimResult, RelayStatements, Sender
from txbox.relay.settlement import BatchSettlement
from txbox.service import Service
from txbox.text import text_of
from txbox.tracing import NO_TRACING, Tracing

MAX_ATTEMPTS = 16
"""With the default backoff, 45 to 90 minutes from a message's first refusal to its dead letter."""

BATCH_SIZE = 500
"""Messages per transaction."""

LONGEST_KEEP_SENT = timedelta(days=36_500)
"""A longer time leads to dates that Postgres does not have."""

CANCEL_SECONDS = 2.0
"""How long a stop whose time is over waits for the calls that it cancels."""

MOST_SENDERS = 8
"""Senders for each usual one, including those that are started for destinations that hang."""

PUBLISH_TIMEOUT_SECONDS = 60.0
"""How long a publisher's call may take before another relay may send its messages."""


class Relay(Service):
    """Sends what the outbox holds.

    ``start`` and ``run`` raise ``SchemaMissing`` if the outbox's tables do not exist, and ``RightsMissing`` if this
    user lacks rights on them that a relay needs.
    """

    batch_bytes = 16 * 1024 * 1024
    """Bytes of message bodies per transaction; a single message may exceed it. A subclass may override it."""

    def __init__(
        self,
        engine: Engine,
        publishers: Mapping[str, Publisher | AsyncPublisher],
        *,
        schema: str | None = None,
        prefix: str = "",
        senders: int = 4,
        max_senders: int | None = None,
        concurrency: int = CONCURRENCY,
        batch_size: int = BATCH_SIZE,
        max_attempts: int | None = MAX_ATTEMPTS,
        backoff: Backoff | None = None,
        keep_sent: timedelta | None = None,
        publish_timeout_seconds: float = PUBLISH_TIMEOUT_SECONDS,
        listen: bool = True,
        hooks: Iterable[Hook] = (),
        tracing: Tracing | None = None,
    ) -> None:
        """Set up a relay; it connects only at ``start`` or ``run``.

        Args:
            engine: the database of the outbox. The relay takes up to ``senders`` connections from its pool, and two
                more for polling and listening; up to ``max_senders`` and two while destinations hang. Async publishers
                need two more, and now and then a third, however many calls are under way, and up to 2,000 of the
                server's locks.
            publishers: the publisher for each kind of destination: ``sqs``, ``sns``, ``eventbridge``, or a scheme of
                your own. ``txbox_aws.publishers.aws_publishers()`` has the first three. A publisher whose ``send`` is a
                coroutine function is awaited in the relay's event loop: see ``AsyncPublisher``.
            schema: the Postgres schema that holds the tables; None leaves it to the search path.
            prefix: what the tables' names start with.
            senders: threads that send, each with its own transaction.
            max_senders: threads that send while destinations hang, so that the others keep theirs. None: eight times
                ``senders``, and no more than three quarters of the engine's pool.
            concurrency: calls of async publishers under way at once, each for one destination; half of them for
                destinations that are new or cannot be reached.
            batch_size: messages per transaction. If a relay is killed, up to this many are sent again for each sender.
            max_attempts: refusals after which a message is parked as a dead letter; None: never.
            backoff: the delay before a refused message is sent again, by attempt.
            keep_sent: how long sent messages stay in the table outbox_sent; None: they are not kept.
            publish_timeout_seconds: how long one call of a publisher may take. After that, an async call is cancelled
                and its messages are sent again. Any other call is not interrupted but reported. If a relay waits, was
                stopped or is cut off, the server ends its transaction, so that another relay may send its messages.
            listen: let a NOTIFY wake an idle relay. Behind a pooler in transaction mode the relay detects that it
                cannot listen.
            hooks: get every event; see ``txbox.instrumentation``.
            tracing: makes a span for each call of a publisher; see ``txbox.instrumentation.opentelemetry_tracing``.

        Raises:
            InvalidConfiguration: an argument cannot work.
        """
        for name, value in (("senders", senders), ("concurrency", concurrency), ("batch_size", batch_size)):
            if value < 1:
                raise InvalidConfiguration(f"Relay.{name} must be at least 1, not {value!r}")
        if max_senders is not None and max_senders < senders:
            raise InvalidConfiguration(f"Relay.max_senders must be at least senders, {senders}, not {max_senders!r}")
        if max_attempts is not None and max_attempts < 1:
            raise InvalidConfiguration(f"Relay.max_attempts must be at least 1, or None, not {max_attempts!r}")
        if keep_sent is not None and not isinstance(keep_sent, timedelta):
            raise InvalidConfiguration(f"Relay.keep_sent must be a timedelta, or None, not {keep_sent!r}")
        if keep_sent is not None and not timedelta(0) < keep_sent <= LONGEST_KEEP_SENT:
            raise InvalidConfiguration(
                f"Relay.keep_sent must be more than 0 and at most {LONGEST_KEEP_SENT.days:,} days, not {keep_sent!r}"
            )
        if publish_timeout_seconds < 1:
            raise InvalidConfiguration(
                f"Relay.publish_timeout_seconds must be at least 1, not {publish_timeout_seconds!r}"
            )
        if not publishers:
            raise InvalidConfiguration("Relay.publishers must have at least one publisher")
        for name in (INBOX, TOPIC):
            if name[:-1] in publishers:
                raise InvalidConfiguration(
                    f"Relay.publishers must not have {name[:-1]!r}: what is published to {name}… goes to a "
                    "PostgresWorker and to no relay; give the publisher another scheme"
                )
        super().__init__()
        self.relay_id = new_message_id()
        self._engine = adopt(engine)
        self._statements = RelayStatements.load(schema, prefix)
        self._outbox = self._statements.name_of("outbox_message")
        self._senders = senders
        self._async_publishers = [publisher for publisher in publishers.values() if is_async(publisher)]
        others = _BESIDE_SENDERS + (_FOR_ASYNC if self._async_publishers else 0)
        self._max_senders = max_senders or _most_senders(engine, senders, others)
        self._concurrency = concurrency
        self._async_sender: AsyncSender | None = None
        self._started = 0
        self._keep_sent = keep_sent
        self._purge_sent = None
        if keep_sent is not None:
            sent = SentMessagesStatements.load(schema, prefix)
            self._purge_sent = partial(purge_sent, statements=sent, keep_sent=keep_sent)
        self._listen = listen
        self._letters = DeadLetters(engine, schema=schema, prefix=prefix)
        self._publish_timeout_seconds = publish_timeout_seconds
        self._dispatcher = Dispatcher(
            publishers, publish_timeout_seconds, halted=self._is_halted, tracing=tracing or NO_TRACING
        )
        self._sender = Sender(
            engine,
            self._statements,
            self._dispatcher,
            letters=self._letters,
            batch_size=batch_size,
            batch_bytes=self.batch_bytes,
            max_attempts=max_attempts,
            backoff=backoff or Backoff(),
            keep_sent=keep_sent is not None,
            publish_timeout_seconds=publish_timeout_seconds,
        )
        self._hooks += [log_event, *hooks]
        self._batch_size = batch_size
        self._scheduler = self._new_scheduler()
        self._reporter = RelayReporter(self.relay_id, self._statements, self._purge_sent)
        self._pauses: Mapping[str, PausedDestination] = {}
        self._drained: set[str] = set()
        self._sent = self._failed = 0
        self._counting = threading.Lock()

    @property
    def sent(self) -> int:
        """Messages sent since this relay was created."""
        return self._sent

    @property
    def failed(self) -> int:
        """Refusals since this relay was created."""
        return self._failed

    def _prepare(self) -> Mapping[str, Callable[[], object]]:
        with short_transaction(self._engine) as connection:
            self._check(connection)
        self._scheduler = self._new_scheduler()
        self._reporter = RelayReporter(self.relay_id, self._statements, self._purge_sent, (self._sent, self._failed))
        self._pauses, self._drained = {}, set()
        poller = OutboxPoller(
            self._engine,
            self._statements,
            self._scheduler,
            self._reporter,
            listen=self._listen,
            stopping=self._stopping,
            counts=lambda: (self._sent, self._failed),
            on_poll=self._on_poll,
            on_pauses=self._heed,
            emit=self._emit,
        )
        work: dict[str, Callable[[], object]] = {"txbox-relay-poller": poller.run}
        if self._async_publishers:
            loop = EventLoop(self._async_publishers, enter_seconds=self._publish_timeout_seconds)
            self._async_sender = self._new_async_sender(loop)
            work |= {"txbox-relay-loop": loop.run, "txbox-relay-async": self._async_sender.run}
        self._started = self._senders
        if not self._dispatcher.all_async:
            work |= {f"txbox-relay-{number}": self._send for number in range(1, self._senders + 1)}
        return work

    def _call_off(self) -> None:
        super()._call_off()
        self._scheduler.close()

    def _stopped(self, finished: bool) -> None:
        if not finished and self._async_sender is not None:
            self._async_sender.cancel()
            for thread in self._threads:
                if thread.name == "txbox-relay-async" and thread is not threading.current_thread():
                    thread.join(CANCEL_SECONDS)  # what was confirmed is settled; other relays take the rest
        self._emit(Stopped(RELAY_SUBSCRIBER, self._outbox, finished))

    def _check(self, connection: Connection) -> None:
        """Raise unless the tables, this user's rights and the encoding let the relay settle what it sends."""
        require_server(connection)
        sql = self._statements
        needed = dict.fromkeys(
            (self._outbox, sql.name_of("outbox_relay"), sql.name_of("reported_activity")), _ALL_RIGHTS
        )
        needed[sql.name_of("dead_letter")] = ("SELECT", "INSERT", "UPDATE")
        check_table(connection, sql.tables.outbox_message)
        check_table(connection, sql.tables.outbox_relay)
        check_table(connection, sql.tables.paused)
        check_table(connection, sql.tables.reported_activity)
        if self._keep_sent is not None:
            check_table(connection, sql.tables.outbox_sent)
            check_table(connection, sql.tables.archive)
            needed[sql.name_of("outbox_sent")] = _ALL_RIGHTS
        self._letters.check(connection)
        pairs = [(name, right) for name, rights in needed.items() for right in rights]
        asked = {"tables": [name for name, _ in pairs], "rights": [right for _, right in pairs]}
        for name, rights in connection.exec_driver_sql(sql.missing_rights, asked):
            raise RightsMissing(name, rights)

    def _is_halted(self, destination: str) -> bool:
        return self._stopping.is_set() or destination in self._pauses

    def _heed(self, pauses: Mapping[str, PausedDestination]) -> None:
        """Stop sending to these destinations and resume all others. The poller calls this."""
        before, self._pauses = self._pauses, pauses
        if pauses.keys() != before.keys():
            self._scheduler.hold_back(frozenset(map(number_of, pauses)))
        for name in sorted(before.keys() - pauses.keys()):
            self._drained.discard(name)
            self._emit(Resumed(RELAY_SUBSCRIBER, name))
        for name in sorted(pauses.keys() - before.keys()):
            self._emit(Paused(RELAY_SUBSCRIBER, name, *pauses[name]))
        for name in sorted(pauses.keys() - self._drained):
            # A claim taken before the pause is in progress until all of it is settled.
            if not self._scheduler.is_in_progress(number_of(name)):
                self._drained.add(name)
                self._emit(Drained(RELAY_SUBSCRIBER, name))
        held = "drained" if len(self._drained) == len(pauses) else "paused"
        self._reporter.set_state(held if pauses else "working")

    def _send(self) -> None:
        scheduler = self._scheduler
        while (claim := scheduler.take()) is not None:
            try:
                self._start_wanted_senders()
                result = self._sender.send(claim)
            except BaseException as error:  # noqa: BLE001 - nothing has changed, and the claim is tried again
                pause = scheduler.fail(claim)
                self._emit(DatabaseLost(RELAY_SUBSCRIBER, self._outbox, error, pause))
            else:
                self._report(result, scheduler.finish(claim, result))

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(
            self._batch_size,
            senders=self._senders,
            most_senders=self._max_senders,
            call_began=self._dispatcher.call_began,
            concurrency=self._concurrency,
            all_async=self._dispatcher.all_async,
        )

    def _new_async_sender(self, loop: EventLoop) -> AsyncSender:
        return AsyncSender(
            self._engine,
            self._statements,
            self._sender,
            self._dispatcher,
            self._scheduler,
            loop,
            batch_size=self._batch_size,
            batch_bytes=self.batch_bytes,
            publish_timeout_seconds=self._publish_timeout_seconds,
            report=self._report,
            on_failure=lambda error, pause: self._emit(DatabaseLost(RELAY_SUBSCRIBER, self._outbox, error, pause)),
            wait=self._stopping.wait,
        )

    def _on_poll(self) -> None:
        self._start_wanted_senders()
        self._report_overdue_calls()

    def _start_wanted_senders(self) -> None:
        """Start senders to replace those that hang. Once started, they stay."""
        if self._started >= self._max_senders:
            return
        wanted = self._scheduler.wanted_senders()
        with self._counting:
            while self._started < wanted and not self._stopping.is_set():
                self._started += 1
                self._add(f"txbox-relay-{self._started}", self._send)

    def _report(self, result: ClaimResult, change: DestinationChange) -> None:
        settlement, destination = result.settlement, result.destination or ""
        refused = len(settlement.again) + len(settlement.dead)
        with self._counting:
            self._sent += len(settlement.sent)
            self._failed += refused
        if settlement.sent:
            self._reporter.sent_to(destination, len(settlement.sent))
        if result.outage is not None:
            self._reporter.lost(destination, text_of(result.outage))
        elif destination:
            self._reporter.restored(destination)
        if change.restored:
            self._emit(BrokerRestored(RELAY_SUBSCRIBER, destination))
        if settlement.sent or refused:
            self._emit(_relayed(destination, settlement))
        if result.outage is not None:
            self._emit(BrokerLost(RELAY_SUBSCRIBER, destination, result.outage, change.pause_seconds))

    def _report_overdue_calls(self) -> None:
        """Report publishers that do not return: each keeps a thread from sending anything else."""
        for call in self._dispatcher.overdue_calls():
            self._reporter.lost(
                call.destination, f"its publisher has not returned for {self._publish_timeout_seconds:g} s"
            )
            if not call.reported:
                call.reported = True
                self._emit(
                    PublisherOverdue(
                        RELAY_SUBSCRIBER,
                        call.destination,
                        messages=len(call.messages),
                        seconds=self._publish_timeout_seconds,
                    )
                )

    def _emit(self, event: Event) -> None:
        emit(self._hooks, event)


def _most_senders(engine: Engine, senders: int, others: int) -> int:
    """Return how many senders leave enough connections of the engine's pool for other work."""
    most, pool = MOST_SENDERS * senders, engine.pool
    if isinstance(pool, QueuePool) and pool.size() > 0 and pool._max_overflow >= 0:  # noqa: SLF001 - there is no other way
        connections = pool.size() + pool._max_overflow  # noqa: SLF001 - the same
        most = min(most, connections * 3 // 4 - others)
    return max(most, senders)


def _relayed(destination: str, settlement: BatchSettlement) -> Relayed:
    errors = [refusal.error for _, refusal in (*settlement.again, *settlement.dead)]
    return Relayed(
        RELAY_SUBSCRIBER,
        destination,
        sent=len(settlement.sent),
        postponed=len(settlement.again),
        parked=len(settlement.dead),
        lag_seconds=max((row.age for row in settlement.sent), default=None),
        error=errors[0] if errors else None,
    )


_ALL_RIGHTS: tuple[str, ...] = ("SELECT", "INSERT", "UPDATE", "DELETE")

_BESIDE_SENDERS = 2
"""Connections of the poller and its listener."""

_FOR_ASYNC = 3
"""Connections of the async sender: one claims, now and then a second one, and one settles."""
