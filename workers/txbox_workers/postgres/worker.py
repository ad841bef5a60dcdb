"""The workers for a subscriber's messages in its own database."""

from typing import Any, Unpack

from txbox import InvalidConfiguration
from txbox_workers.coroutines import DEFAULTS, AsyncWorker, AsyncWorkerOptions
from txbox_workers.options import BATCH_SIZE, MAX_BATCH_SIZE, WorkerOptions, lists_options
from txbox_workers.polling.prefetching_poller import RECEIVE_DELIVERIES
from txbox_workers.postgres.source import VISIBILITY_SECONDS, PostgresSource
from txbox_workers.worker import Worker


class PostgresWorker(Worker):
    """Processes the messages for one subscriber in its own database: no broker, no relay, one commit.

    ::

        outbox.publish(session, "inbox:billing", b'{"account_id": 7}', key="7")      # in any transaction

        def on_purchase(session, message):
            session.execute(update(Account).where(...).values(...))

        worker = PostgresWorker(inbox=Inbox("billing"), engine=engine, handler=on_purchase)
        worker.run()
    """

    @lists_options(WorkerOptions)
    def __init__(self, *, visibility_seconds: float = VISIBILITY_SECONDS, **options: Unpack[WorkerOptions]) -> None:
        """Make a worker. It does not connect before ``start`` or ``run``.

        Args:
            visibility_seconds: how long a frozen or cut off worker's messages wait for another worker. Those of a
                killed one do not wait.
            options: those of ``txbox_workers.options.WorkerOptions``. The messages of the inbox's subscriber are
                consumed, from the outbox with the same schema and prefix; with a ledger alone, those of its subscriber,
                from where ``dead_letters`` are kept. ``batch_size`` may be 1 to 1,000.
                ``prefetch`` gains nothing here: messages are read ahead anyway, and settled by their transaction.

        Raises:
            TypeError: there is no such option.
            InvalidConfiguration: an argument cannot work.
        """
        most = RECEIVE_DELIVERIES if options.get("prefetch") else MAX_BATCH_SIZE
        source = _source(type(self).__name__, options, visibility_seconds, most=most)
        if not options.get("prefetch"):
            options.pop("batch_size", None)  # a batch is what one receive brings
        super().__init__(source, **options)


class AsyncPostgresWorker(AsyncWorker):
    """Processes the messages for one subscriber in its own database, with coroutine handlers.

    ::

        worker = AsyncPostgresWorker(inbox=AsyncInbox("billing"), engine=engine, handler=on_purchase)
        asyncio.run(worker.run())
    """

    @lists_options(AsyncWorkerOptions, **DEFAULTS)
    def __init__(
        self, *, visibility_seconds: float = VISIBILITY_SECONDS, **options: Unpack[AsyncWorkerOptions]
    ) -> None:
        """Make a worker. It does not connect before ``start`` or ``run``.

        Arguments and errors are those of ``PostgresWorker``; the options, of
        ``txbox_workers.coroutines.AsyncWorkerOptions``.
        """
        source = _source(type(self).__name__, options, visibility_seconds, most=RECEIVE_DELIVERIES)
        super().__init__(source, **options)
        if source.is_async:
            source.call = self._calls.call


def _source(of: str, options: Any, visibility_seconds: float, *, most: int) -> PostgresSource:
    """Return the source for these options of a worker, which receives at most ``most`` messages at once."""
    inbox, ledger = options.get("inbox"), options.get("ledger")
    engine, place = options.get("engine"), getattr(inbox, "sync_inbox", inbox)
    if inbox is None and ledger is not None:  # the messages are where its dead letters are kept
        place = options.get("dead_letters")
        engine = getattr(place, "engine", None)
    if place is None or engine is None:
        raise InvalidConfiguration(
            f"{of} needs inbox=Inbox(…) and engine=…, or ledger=… and dead_letters=DeadLetters(engine): it consumes "
            "the messages of that subscriber in that database"
        )
    batch_size = options.get("batch_size", BATCH_SIZE)
    if not isinstance(batch_size, int) or not 1 <= batch_size <= MAX_BATCH_SIZE:
        raise InvalidConfiguration(f"{of}.batch_size must be from 1 to {MAX_BATCH_SIZE:,}, not {batch_size!r}")
    return PostgresSource(
        getattr(engine, "sync_engine", engine),
        getattr(inbox or ledger, "subscriber_id", ""),
        schema=place.schema,
        prefix=place.prefix,
        ordered=bool(options.get("ordered")),
        batch_size=min(batch_size, most),
        visibility_seconds=visibility_seconds,
    )
