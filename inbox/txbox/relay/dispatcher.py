"""Handing messages to publishers, and understanding what they answer: they may be the host's code, and anything."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from txbox.dead_letters.failures import describe
from txbox.errors import BrokerError, NotSendable
from txbox.relay.publisher import OutboxMessage, PartlySent, Publisher, Refused
from txbox.relay.settlement import Row
from txbox.threads import text_of
from txbox.wire.destinations import scheme

__all__ = ["Answer", "Call", "Handover"]


@dataclass(slots=True)
class Answer:
    """What publishers have answered, by position.

    Attributes:
        refused: what was not sent, through its own fault or by chance.
        unsent: what is to be sent again, and is not to blame.
        outage: why the broker cannot be reached; None if it can.
    """

    refused: dict[int, Refused] = field(default_factory=dict)
    unsent: set[int] = field(default_factory=set)
    outage: BrokerError | None = None


@dataclass(slots=True)
class Call:
    """A call of a publisher that has not returned.

    Attributes:
        destination: of the first of its messages.
        messages: how many they are.
        began: when, by ``time.monotonic``.
        told: whether it was found to be overdue before.
    """

    destination: str
    messages: int
    began: float
    told: bool = False


class Handover:
    """Hands messages to the publishers of their kinds. Used by several threads at once."""

    def __init__(self, publishers: Mapping[str, Publisher], patience_seconds: float) -> None:
        """Take the publishers.

        Args:
            publishers: by the kind of destination.
            patience_seconds: how long one call may take.
        """
        self._publishers = publishers
        self._patience_seconds = patience_seconds
        self._calls: dict[int, Call] = {}

    def began(self, thread: int) -> float | None:
        """Return when the call began that a thread makes now, by ``time.monotonic``; None if it makes none."""
        call = self._calls.get(thread)
        return None if call is None else call.began

    def overdue(self) -> list[Call]:
        """Return the calls that have taken too long, and have not returned."""
        latest = time.monotonic() - self._patience_seconds
        return [call for call in list(self._calls.values()) if call.began < latest]

    def send(self, rows: Sequence[Row]) -> Answer:
        """Send messages of which no two have one key, and return what became of them. What is not in it was sent."""
        answer = Answer()
        by_kind: dict[str, list[Row]] = {}
        for row in rows:
            try:
                kind = scheme(row.message.destination)
                if row.flaw is not None:
                    raise NotSendable(row.message.destination, row.flaw)
            except NotSendable as error:  # published by hand: ``publish`` would have refused it
                answer.refused[row.position] = Refused(row.message, str(error), final=True)
            else:
                by_kind.setdefault(kind, []).append(row)
        for kind, of_kind in by_kind.items():
            self._send_kind(kind, of_kind, answer)
        return answer

    def _send_kind(self, kind: str, rows: Sequence[Row], answer: Answer) -> None:
        messages = [row.message for row in rows]
        refused: Sequence[Refused] = ()
        unsent: Sequence[OutboxMessage] = ()
        try:
            with self._watched(messages):
                refused = self._publish(kind, messages)
        except PartlySent as error:
            answer.outage, refused, unsent = error, error.refused, error.unsent
        except BrokerError as error:
            answer.outage, unsent = error, messages
        if not refused and not unsent:
            return
        refusals = {_name(refusal.message): refusal for refusal in refused}
        left = {_name(message) for message in unsent}
        for row in rows:
            if (refusal := refusals.get(_name(row.message))) is not None:
                answer.refused[row.position] = refusal
            elif _name(row.message) in left:
                answer.unsent.add(row.position)

    @contextmanager
    def _watched(self, messages: Sequence[OutboxMessage]) -> Iterator[None]:
        thread = threading.get_ident()
        self._calls[thread] = Call(messages[0].destination, len(messages), time.monotonic())
        try:
            yield
        finally:
            del self._calls[thread]

    def _publish(self, kind: str, messages: Sequence[OutboxMessage]) -> Sequence[Refused]:
        publisher = self._publishers.get(kind)
        if publisher is None:
            raise BrokerError(
                f"the relay has no publisher for {kind!r}, which {messages[0].destination} needs; "
                f"it has {', '.join(sorted(self._publishers)) or 'none'}",
                permanent=True,
            )
        try:
            return _understood(publisher.send(messages), messages)
        except PartlySent as error:
            try:
                _understood(error.refused, [*messages, *error.unsent])
                _understood([Refused(message, "") for message in error.unsent], messages)
            except TypeError as nonsense:
                raise BrokerError(f"{text_of(error)}; and {nonsense}") from error
            raise
        except BrokerError:
            raise
        except BaseException as error:  # noqa: BLE001 - a publisher may be the host's code, and end its thread with us
            return [Refused(message, describe(error)) for message in messages]


def _understood(answer: object, messages: Sequence[OutboxMessage]) -> Sequence[Refused]:
    """Return what a publisher has answered, if it is what it should be.

    Raises:
        TypeError: it is not; then nothing can be said of the messages but that they may have arrived.
    """
    refused: list[Refused] = list(answer or ())  # type: ignore[call-overload]
    known = {_name(message) for message in messages} if refused else set()
    for one in refused:
        if not (isinstance(one, Refused) and isinstance(one.error, str)):
            raise TypeError(f"a publisher returned {one!r:.200}: return Refused(message, why) for each refusal")
        if _name(one.message) not in known:
            raise TypeError(f"a publisher refused {one.message!r:.200}, which it was not given")
    return refused


def _name(message: OutboxMessage) -> tuple[str, str]:
    """Return what a publisher's answer is recognized by: its messages may be copies of ours."""
    return message.id, message.destination
