"""The messages in hand, so that every log line written meanwhile can name them.

A worker sets this around its work on a message, including handlers, in the thread that does the work. It is a context
variable: coroutines that a handler runs see it too; threads that a handler starts do not, unless they copy it.
"""

from collections.abc import Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass

MOST_IDS = 10
"""Most ids named of a batch that one call handles."""


@dataclass(frozen=True, slots=True)
class MessagesInHand:
    subscriber_id: str
    message_ids: tuple[str, ...]


_in_hand: ContextVar[MessagesInHand | None] = ContextVar("txbox_messages_in_hand", default=None)


class in_hand:  # noqa: N801 - used as a function
    """While entered, log lines name these messages."""

    __slots__ = ("_messages", "_token")
    _token: Token[MessagesInHand | None]

    def __init__(self, subscriber_id: str, message_ids: Sequence[str]) -> None:
        self._messages = MessagesInHand(subscriber_id, tuple(message_ids[:MOST_IDS]))

    def __enter__(self) -> None:
        self._token = _in_hand.set(self._messages)

    def __exit__(self, *_: object) -> None:
        _in_hand.reset(self._token)


def messages_in_hand() -> MessagesInHand | None:
    """Return the messages being worked on in this context; None if there are none."""
    return _in_hand.get()
