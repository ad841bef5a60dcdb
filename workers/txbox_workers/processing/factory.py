"""Which processor a worker or a Lambda function needs, by what it was given."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Engine

from txbox import Failures, Inbox, InvalidConfiguration, Message
from txbox.backoff import Backoff
from txbox.instrumentation import Committed, HeartbeatFailed, Hook, emit
from txbox.leases import Lease, Ledger
from txbox.leases.lease import valid_lease_seconds
from txbox.leases.ledger import require_ledger
from txbox.leases.runner import takes_lease
from txbox.postgres.engines import adopt
from txbox.threads import text_of
from txbox_workers.handlers import BatchHandler, Handler, HandlerWithLease, refuse_unfit
from txbox_workers.processing import processor
from txbox_workers.processing.contention import Contention
from txbox_workers.processing.handler_transactions import Halt, HandlerTransactions, SessionFactory
from txbox_workers.processing.inbox_processor import InboxProcessor
from txbox_workers.processing.ledger_processor import LedgerProcessor
from txbox_workers.processing.parking import Parking
from txbox_workers.processing.processor import Processor
from txbox_workers.processing.transaction_limits import TimeLimit, limited, unlimited

__all__ = ["Processing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Processing:
    """How deliveries are to be processed; see ``Worker`` for what each of these means.

    Raises:
        InvalidConfiguration: when made, if something cannot work; it says of what, by the name in ``of``.
    """

    of: str
    inbox: Inbox | None
    ledger: Ledger | None
    engine: Engine | None
    handler: Handler | None
    batch_handler: BatchHandler | None
    transactions: Literal["batch", "message"]
    max_attempts: int | None
    backoff: Backoff
    session_factory: SessionFactory
    lease_seconds: float
    fingerprint: bool

    def __post_init__(self) -> None:
        if self.inbox is None and self.ledger is None:
            raise InvalidConfiguration(f"{self.of} needs an inbox, or a ledger, or both")
        for name, value, kind in (("inbox", self.inbox, Inbox), ("engine", self.engine, Engine)):
            if value is not None and not isinstance(value, kind):
                raise InvalidConfiguration(f"{self.of}.{name} must be an {kind.__name__}, not {type(value).__name__}")
        if self.ledger is not None:
            require_ledger(self.ledger, f"{self.of}.ledger")
        if self.inbox is not None and self.engine is None:
            raise InvalidConfiguration(f"{self.of} needs the engine of its inbox")
        if (self.handler is None) == (self.batch_handler is None):
            raise InvalidConfiguration(f"{self.of} needs either handler or batch_handler, and not both")
        if self.ledger is not None and self.handler is None:
            raise InvalidConfiguration(f"{self.of} with a ledger needs handler: each message has a lease of its own")
        if self.batch_handler is not None:
            refuse_unfit(self.batch_handler, f"{self.of}.batch_handler", "session, messages", ledger=False)
        else:
            wanted = "message" if self.inbox is None else "session, message"
            refuse_unfit(self.handler, f"{self.of}.handler", wanted, ledger=self.ledger is not None)
        if self.inbox is not None and self.ledger is not None and self.inbox.subscriber_id != self.ledger.subscriber_id:
            raise InvalidConfiguration(
                f"{self.of} has an inbox of {self.inbox.subscriber_id} and a ledger of {self.ledger.subscriber_id}; "
                "they have to be of one subscriber"
            )
        if self.fingerprint and self.ledger is None:
            raise InvalidConfiguration(
                f"{self.of}.fingerprint is the ledger's; for an inbox: Inbox(…, fingerprint=True)"
            )
        if self.transactions not in ("batch", "message"):
            raise InvalidConfiguration(
                f"{self.of}.transactions must be 'batch' or 'message', not {self.transactions!r}"
            )
        if self.max_attempts is not None and self.max_attempts < 1:
            raise InvalidConfiguration(f"{self.of}.max_attempts must be at least 1, or None, not {self.max_attempts!r}")
        valid_lease_seconds(self.lease_seconds, f"{self.of}.lease_seconds")
        if self.engine is not None:
            adopt(self.engine)

    @property
    def subscriber_id(self) -> str:
        """The consumer's name."""
        keeper = self.inbox or self.ledger
        assert keeper is not None  # noqa: S101 - for the type checker: see __post_init__
        return keeper.subscriber_id

    def processor(
        self,
        *,
        source_name: str,
        hooks: Sequence[Hook],
        wants_details: Callable[[], bool],
        stopping: Halt,
        cut_short: Halt | None = None,
        ends_at: Callable[[], float | None] = lambda: None,
        limit: TimeLimit = unlimited,
    ) -> Processor:
        """Make the processor.

        Args:
            source_name: where deliveries come from, for events and dead letters.
            hooks: told of every event.
            wants_details: whether anybody hears the events of messages that went well.
            stopping: says when nothing more is to be begun.
            cut_short: as ``HandlerTransactions``.
            ends_at: as ``LedgerProcessor``.
            limit: says how long a transaction may take.
        """
        parking, transactions, engine = None, None, None
        if self.engine is not None:
            engine = limited(self.engine, limit)
            beside_inbox = self.inbox is not None
            parking = Parking(
                engine,
                self.subscriber_id,
                source_name,
                beside_inbox=beside_inbox,
                in_flight_seconds=lambda count: processor.IN_FLIGHT_BACKOFF.seconds(count),
                **self._place(),
            )
        if self.inbox is not None and self.engine is not None:
            transactions = HandlerTransactions(
                inbox=self.inbox,
                engine=self.engine,
                handler=self.handler if self.ledger is None or self.handler is None else _under_lease(self.handler),
                batch_handler=self.batch_handler,
                session_factory=self.session_factory,
                source_name=source_name,
                hooks=hooks,
                wants_details=wants_details,
                stopping=stopping,
                cut_short=cut_short,
                limit=limit,
                contention=Contention(together=self.transactions == "batch" and self.ledger is None),
            )
        if self.ledger is None:
            assert transactions is not None  # noqa: S101 - for the type checker: see __post_init__
            assert parking is not None  # noqa: S101
            assert engine is not None  # noqa: S101
            return InboxProcessor(
                transactions=transactions,
                failures=Failures(engine, self.subscriber_id, **self._place()),
                parking=parking,
                engine=engine,
                one_transaction_per_message=self.transactions == "message",
                max_attempts=self.max_attempts,
                backoff=self.backoff,
                stopping=stopping,
            )
        assert self.handler is not None  # noqa: S101 - for the type checker: see __post_init__

        def completed(first: bool, seconds: float) -> None:
            if wants_details():
                emit(hooks, Committed(self.subscriber_id, source_name, int(first), int(not first), seconds))

        def renewal_failed(lease: Lease, error: Exception) -> None:
            emit(
                hooks,
                HeartbeatFailed(self.subscriber_id, source_name, lease.message_id, f"its lease: {text_of(error)}"),
            )

        return LedgerProcessor(
            ledger=self.ledger,
            handler=self.handler,
            transactions=transactions,
            parking=parking,
            lease_seconds=self.lease_seconds,
            fingerprint=self.fingerprint,
            max_attempts=self.max_attempts,
            backoff=self.backoff,
            stopping=stopping,
            completed=completed,
            renewal_failed=renewal_failed,
            ends_at=ends_at,
        )

    def _place(self) -> dict[str, Any]:
        """Where the tables are, those of the inbox or of a ledger in Postgres, and how long to wait there."""
        keeper = self.inbox or self.ledger
        place = {"schema": getattr(keeper, "schema", None), "prefix": getattr(keeper, "prefix", "")}
        return place if self.inbox is None else {**place, "wait_seconds": self.inbox.wait_seconds}


def _under_lease(handler: Handler) -> HandlerWithLease:
    """Have the lease know how far the handler has come: its transaction may be run again, or not be committed."""
    wants_lease = takes_lease(handler)
    call: Callable[..., object] = handler

    def run(session: Any, message: Message, /, *, lease: Lease) -> object:
        lease.begin_work()
        result = call(session, message, **({"lease": lease} if wants_lease else {}))
        lease.returned = True
        return result

    return run
