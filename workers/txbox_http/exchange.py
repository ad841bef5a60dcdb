"""The exchange: one request and its response, held until it is settled what becomes of them.

The body is kept as the application reads it, so that a request can be run again after a conflict. Nothing of a response
leaves before its work is settled: a client never hears of an effect that was rolled back.
"""

from collections.abc import Callable

import anyio
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Send

from txbox.errors import EffectUnknown, InvalidConfiguration
from txbox_http.answer import Answer
from txbox_http.problems import problem
from txbox_http.strength import Answered, Work


class NotWhole(EffectUnknown):
    """The response is not whole; the handler may have had its effect."""


class Exchange:
    """What a middleware gives to the application in place of ``receive`` and ``send``."""

    def __init__(self, receive: Receive, send: Send, *, max_request_bytes: int, keeps: Callable[[int], bool]) -> None:
        """Take both of a request.

        Args:
            receive: the server's.
            send: the server's.
            max_request_bytes: of a body that is kept.
            keeps: given the status of a response, whether its effect is to stay.
        """
        self._receive = receive
        self._send = send
        self._max_request_bytes = max_request_bytes
        self._keeps = keeps
        self._messages: list[Message] = []
        self._next = 0  # of the messages, the first that the application has not read
        self._size = 0
        self._is_whole = False
        self._is_too_large = False
        self._begin_again()

    def _begin_again(self) -> None:
        self._next = 0
        self.work: Work | None = None
        self.is_begun = False
        self.is_answered = False  # or what answers it has begun to leave
        self._answered = anyio.Event()
        self.failure: BaseException | None = None
        self._start: Message | None = None
        self._body = bytearray()
        self._is_ended = False

    def rewind(self) -> bool:
        """Prepare for another run of the application; return whether that is possible."""
        if self.is_answered or self._is_too_large:
            return False
        self._begin_again()
        return True

    def begin(self, work: Work | None) -> None:
        """Hold the response from now on, until its work is settled; None: there is nothing to settle."""
        self.is_begun = True
        self.work = work

    async def receive(self) -> Message:
        """Give the application the next part of the request."""
        if self._next < len(self._messages):
            self._next += 1
            return self._messages[self._next - 1]
        message = await self._read()
        self._next = len(self._messages)
        if message["type"] == "http.disconnect" and self.work is not None and self._is_whole:
            await self._answered.wait()  # a stream would stop here, and what there is of it look like the whole
        return message

    async def read_body(self) -> bytes | None:
        """Return the whole body, which the application can still read; None if it is too large."""
        while not (self._is_whole or self._is_too_large):
            if (await self._read())["type"] == "http.disconnect":
                raise ClientDisconnect
        return None if self._is_too_large else b"".join(message.get("body", b"") for message in self._messages)

    async def _read(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request" and not self._is_whole:
            self._is_whole = not message.get("more_body", False)
            if self._is_too_large:
                return message
            self._size += len(message.get("body", b""))
            self._messages.append(message)
            if self._size > self._max_request_bytes:
                self._is_too_large = True
                self._messages.clear()
        return message

    async def send(self, message: Message) -> None:
        """Take the next part of the response; with the last one its work is settled, and all of it is sent.

        BaseHTTPMiddleware of Starlette ends a body with an empty part also if its stream has failed, and raises the
        error after that. So where such an end may be a cut, ``end`` settles the work.
        """
        if self.work is None:
            self.is_answered = True
            await self._send(message)
            return
        if message["type"] == "http.response.debug":
            await self._send(message)  # for Starlette's TestClient
        elif message["type"] in ("http.response.early_hint", "http.response.trailers"):
            return  # a hint would come too late, and trailers are not kept
        elif message["type"] == "http.response.start":
            self._start = message
        elif message["type"] == "http.response.body" and self._start is not None:
            part = message.get("body", b"")
            self._body += part
            self._is_ended = not message.get("more_body", False)
            try:
                self._refuse_large(self.work)
                if self._is_ended and (part or self._is_surely_whole(self._start)):
                    await self._settle(self.work, self._start)
            except BaseException as error:
                self.failure = error  # what is around the application's send may wrap it
                raise
        else:
            raise InvalidConfiguration(
                f"{message['type']} cannot be kept: answer with a response whose body the application sends itself"
            )

    def _is_surely_whole(self, start: Message) -> bool:
        lengths = [bytes(value) for name, value in start.get("headers", ()) if bytes(name).lower() == b"content-length"]
        return start["status"] in (204, 304) or lengths == [b"%d" % len(self._body)]

    async def end(self) -> None:
        """Settle the work, where the last part has not done so: the application has returned without an error."""
        if self.work is not None and self._start is not None and self._is_ended and not self.is_answered:
            await self._settle(self.work, self._start)

    def as_unknown(self, error: BaseException) -> BaseException:
        """Return with what to give the work up: an error after the response has begun does not undo its effect."""
        if self._start is None or not isinstance(error, Exception):
            return error
        unknown = NotWhole(f"the response was begun, and then failed: {error!r}")
        unknown.__cause__ = error
        return unknown

    async def _settle(self, work: Work, start: Message) -> None:
        headers = tuple((bytes(name).lower(), bytes(value)) for name, value in start.get("headers", ()))
        answer = Answer(start["status"], headers, bytes(self._body))
        await work.finish(answer, done=self._keeps(answer.status))
        await self.answer(answer)

    def _refuse_large(self, work: Work) -> None:
        limit = work.max_response_bytes
        if limit is not None and len(self._body) > limit:
            raise Answered(
                problem(
                    "response-too-large",
                    f"More than {limit:,} bytes are not kept. Nothing was done: the service has to put the content "
                    "elsewhere and answer with its place, or to allow more.",
                )
            )

    async def answer(self, answer: Answer) -> None:
        """Send an answer."""
        self.is_answered = True
        self._answered.set()
        for message in answer.messages():
            await self._send(message)
