"""The handler of a Lambda function whose message handlers are coroutines."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any, Unpack

from txbox import Identify, identify
from txbox.messages import MessageType
from txbox.postgres.drivers.greenlets import run_in_greenlet
from txbox_aws.envelopes import Envelope
from txbox_aws.lambda_.deadline import MARGIN_SECONDS
from txbox_aws.lambda_.handler import PartialBatchResponse, make_function
from txbox_workers.coroutines import DEFAULTS, AsyncProcessingOptions, for_functions
from txbox_workers.options import lists_options


@lists_options(AsyncProcessingOptions, **DEFAULTS)
def async_sqs_handler(
    *,
    identify: Identify = identify,
    envelope: Envelope | str = Envelope.AUTO,
    margin_seconds: float = MARGIN_SECONDS,
    **options: Unpack[AsyncProcessingOptions],
) -> Callable[[Any, Any], PartialBatchResponse]:
    """Make the handler of a Lambda function that an SQS queue triggers and that awaits a coroutine per message.

    ::

        engine = create_async_engine(os.environ["DATABASE_URL"], pool_size=1, max_overflow=0)

        async def on_purchase(session, message):
            await session.execute(update(Account).where(...).values(...))

        handler = async_sqs_handler(inbox=AsyncInbox("billing"), engine=engine, handler=on_purchase)

    It has its own event loop, which stays for later events, as the connections do. The messages of an event are handled
    one after the other, because they share a transaction; what one handler does may run concurrently. It handles one
    event at a time: a second thread waits.

    Arguments and errors are those of ``sqs_handler``; the options, of
    ``txbox_workers.coroutines.AsyncProcessingOptions``.

    Returns:
        ``handle(event, context)``, a plain function, as Lambda requires; it returns and raises like that of
        ``sqs_handler``.
    """
    of = "async_sqs_handler"
    given = for_functions(of, AsyncProcessingOptions, options)
    function = make_function(of, given, identify=identify, envelope=envelope, margin_seconds=margin_seconds)
    return _FunctionOnLoop(function).handle


class _FunctionOnLoop:
    """A Lambda function and the event loop that its coroutines run on."""

    def __init__(self, function: Callable[[Any, Any], PartialBatchResponse]) -> None:
        self._function = function
        self._turn = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def message_type(self) -> MessageType | None:
        """The type that bodies are read as for the handler; None if the handler takes the messages themselves."""
        found: MessageType | None = self._function.__self__.message_type  # type: ignore[attr-defined] # a method
        return found

    def handle(self, event: Any, context: Any = None) -> PartialBatchResponse:
        with self._turn:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
            return self._loop.run_until_complete(run_in_greenlet(self._function, event, context))
