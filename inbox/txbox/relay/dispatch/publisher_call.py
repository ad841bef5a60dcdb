"""A call of a publisher, and what is made of its answer: it may be the host's code, and return or raise anything."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

from txbox.dead_letters.failures import describe
from txbox.error_logging import text_of
from txbox.errors import BrokerError
from txbox.relay.publisher import OutboxMessage, PartlySent, Refused
from txbox.relay.settlement import Row
from txbox.tracing import NO_SPAN, Span


@dataclass(slots=True, eq=False)
class PublisherCall:
    """A call of a publisher: to be made, under way, or with what has come of it."""

    kind: str
    rows: Sequence[Row]  # no two of them have one key
    messages: Sequence[OutboxMessage]  # theirs
    began: float = 0.0  # when, by ``time.monotonic``
    reported: bool = False  # whether it was found to be overdue before
    answer: object = None
    error: BaseException | None = None
    span: Span = NO_SPAN

    def __str__(self) -> str:
        return f"{self.destination}, of {len(self.messages)} messages from {self.messages[0].id} on"

    @property
    def destination(self) -> str:
        """That of the first of its messages."""
        return self.messages[0].destination

    def refusals(self) -> Sequence[Refused]:
        """Return which of its messages were refused; raises ``BrokerError`` if the broker could not be reached."""
        messages = self.messages
        try:
            if self.error is not None:
                raise self.error
            return _checked(self.answer, messages)
        except PartlySent as error:
            try:
                _checked(error.refused, [*messages, *error.unsent])
                _checked([Refused(message, "") for message in error.unsent], messages)
            except TypeError as nonsense:
                raise BrokerError(f"{text_of(error)}; and {nonsense}") from error
            raise
        except BrokerError:
            raise
        except BaseException as error:  # noqa: BLE001 - as in ``dispatch``
            return [Refused(message, describe(error)) for message in messages]


def _checked(answer: object, messages: Sequence[OutboxMessage]) -> Sequence[Refused]:
    """Return what a publisher has answered, or raise TypeError: then each of the messages may have arrived, or not."""
    if inspect.iscoroutine(answer):
        answer.close()
        raise TypeError("a publisher returned a coroutine: write its method as async def send")
    refused: list[Refused] = list(answer or ())  # type: ignore[call-overload]
    given = {name_of(message) for message in messages} if refused else set()
    for one in refused:
        if not (isinstance(one, Refused) and isinstance(one.error, str)):
            raise TypeError(f"a publisher returned {one!r:.200}: return Refused(message, why) for each refusal")
        if name_of(one.message) not in given:
            raise TypeError(f"a publisher refused {one.message!r:.200}, which it was not given")
    return refused


def name_of(message: OutboxMessage) -> tuple[str, str]:
    """Return by what the messages in a publisher's answer are recognized: they may be copies of ours."""
    return message.id, message.destination
