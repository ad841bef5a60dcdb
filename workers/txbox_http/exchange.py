"""The exchange: one request and its response, which is held until the request's work is settled.

The body is kept as the application reads it, so that a request can run again after a conflict. Nothing of a response is
sent before its work is settled: a client never hears of an effect that was rolled back. Only work under a lease, which
cannot be rolled back, may answer with more than is held; then the end of the response is held.
"""

from collections.abc import Callable
from contextlib import suppress

import anyio
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Send

from txbox.errors import EffectUnknown, InvalidConfiguration
from txbox_http.answer import Answer
from txbox_http.problems import problem
from txbox_http.strength import Answered, Work


class NotWhole(EffectUnknown):
    """The response is not whole; the handler may have had its effect."""


class Exchange:
    """What a middleware gives to the application in place of ``receive`` and ``send``."""

    def __init__(
        self,
        receive: Receive,
        send: Send,
        *,
        max_request_bytes: int,
        keeps: Callable[[int], bool],
        documentation: str,
    ) -> None:
        """Wrap a request's ``receive`` and ``send``.

        Args:
            receive: the server's.
            send: the server's.
            max_request_bytes: the largest body that is kept.
            keeps: given the status of a response, returns whether its effect stays.
            documentation: the page that problems link to.
        """
        self._receive = receive
        self._send = send
        self._max_request_bytes = max_request_bytes
        self._keeps = keeps
        self._documentation = documentation
        self._messages: list[Message] = []
        self._next = 0  # index of the first message that the application has not read
        self._size = 0
        self._is_whole = False
        self._is_too_large = False
        self._begin_again()

    def _begin_again(self) -> None:
        self._next = 0
        self.work: Work | None = None
        self.is_begun = False
        self.is_answered = False  # or its answer is being sent
        self._answered = anyio.Event()
        self.failure: BaseException | None = None
        self.refusal: Answered | None = None
        self._start: Message | None = None
        self._body = bytearray()
        self._length = 0  # of the body, including what has been sent
        self._is_ended = False
        self._is_passed_on = False  # its first parts have been sent: it is too large to be held
        self._fails_before_its_end = False

    def rewind(self) -> bool:
        """Prepare for another run of the application; return whether that is possible."""
        if self.is_answered or self._is_too_large:
            return False
        self._begin_again()
        return True

    def refuse(self, refusal: Answered) -> None:
        """Set what answers the request, whatever the application makes of the error: it may catch or wrap it."""
        if not self.is_answered:
            self.refusal = refusal

    def begin(self, work: Work | None) -> None:
        """Hold the response from now on, until its work is settled; None means that there is nothing to settle."""
        self.is_begun = True
        self.work = work

    def note_handler(self, request: Request) -> None:
        """Record whether the error of a failed stream surely arrives before the stream's end, or perhaps after it.

        Starlette's BaseHTTPMiddleware ends a body even if its stream has failed, and raises the error after that. It
        gives applications a ``receive`` of its own. A request made before a route is found, as such middlewares get,
        says nothing about a handler. Neither does one made by ``IdempotencyMiddleware``, which may be below the route
        of a mount.
        """
        if type(request) is Request and "endpoint" in request.scope and request.receive == self.receive:
            self._fails_before_its_end = True

    async def receive(self) -> Message:
        """Return the next part of the request to the application."""
        if self._next < len(self._messages):
            self._next += 1
            return self._messages[self._next - 1]
        message = await self._read()
        self._next = len(self._messages)
        if message["type"] == "http.disconnect" and self.work is not None and self._is_whole:
            await self._answered.wait()  # a stream would stop here, and what exists of it would look whole
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
        """Take the next part of the response. The last part settles the work and sends the whole response.

        If that end may be a premature one, see ``note_handler``, ``end`` settles the work instead.
        """
        if (self.refusal is not None and not self.is_answered) or self.failure is not None:
            return  # an inner application's answer to the error, such as a 500: the middleware has the answer
        if self.work is None:
            self.is_answered = True
            await self._send(message)
            return
        if message["type"] == "http.response.debug":
            await self._send(message)  # for Starlette's TestClient
        elif message["type"] in ("http.response.early_hint", "http.response.trailers"):
            return  # a hint would come too late; trailers are not kept
        elif message["type"] == "http.response.start":
            self._start = message
        elif message["type"] == "http.response.body" and self._start is not None:
            part = message.get("body", b"")
            self._is_ended = not message.get("more_body", False)
            try:
                await self._hold(self.work, self._start, part)
                if self._is_ended and not self._may_be_of_an_error and (part or self._is_surely_whole(self._start)):
                    await self._settle(self.work, self._start)
            except BaseException as error:
                self.failure = error  # code around the application's send may wrap it
                raise
        else:
            raise InvalidConfiguration(
                f"{message['type']} cannot be kept: answer with a response whose body the application sends itself"
            )

    @property
    def _may_be_of_an_error(self) -> bool:
        """Whether this may be an inner application's answer to an error that it raises next, such as a mounted one's.

        If the error is a conflict, the request runs again, so the response is held until the application has ended.
        """
        if self.work is None or self._start is None or not self.work.may_run_again:
            return False
        return self._start["status"] >= 500 and not self._keeps(self._start["status"])

    def _is_surely_whole(self, start: Message) -> bool:
        if self._fails_before_its_end:
            return True
        lengths = [bytes(value) for name, value in start.get("headers", ()) if bytes(name).lower() == b"content-length"]
        return start["status"] in (204, 304) or lengths == [b"%d" % self._length]

    async def end(self) -> None:
        """Settle the work if the last part has not done so: the application has ended."""
        if self.work is not None and self._start is not None and self._is_ended and not self.is_answered:
            await self._settle(self.work, self._start)

    async def end_with_error(self) -> None:
        """Settle the work with an inner application's answer to an error, if there is one."""
        if self.failure is None and self._may_be_of_an_error:
            await self.end()

    def as_unknown(self, error: BaseException) -> BaseException:
        """Return the error to give the work up with. An error after the response has begun does not undo its effect."""
        if self._start is None or not isinstance(error, Exception):
            return error
        unknown = NotWhole(f"the response was begun, and then failed: {error!r}")
        unknown.__cause__ = error
        return unknown

    async def _settle(self, work: Work, start: Message) -> None:
        headers = tuple((bytes(name).lower(), bytes(value)) for name, value in start.get("headers", ()))
        answer = Answer(start["status"], headers, bytes(self._body), is_whole=not self._is_passed_on)
        await work.finish(answer, done=self._keeps(answer.status))
        await self.answer(answer)

    async def _hold(self, work: Work, start: Message, part: bytes) -> None:
        """Hold a part of the body. If that would be too much, and nothing can be undone, send the parts before it.

        The last part is always held until the work is settled: before it, no client takes the response for whole.
        """
        limit = work.max_response_bytes
        is_too_much = limit is not None and len(self._body) + len(part) > limit
        if is_too_much and work.may_run_again:
            raise Answered(
                problem(
                    "response-too-large",
                    f"More than {limit:,} bytes are not kept. Nothing was done: the service has to put the content "
                    "elsewhere and answer with its place, or to allow more.",
                    self._documentation,
                )
            )
        if is_too_much and self._body and part:
            with suppress(OSError):  # the client has left, but the effect is there
                if not self._is_passed_on:
                    self._is_passed_on = True
                    await self._send(start)
                await self._send({"type": "http.response.body", "body": bytes(self._body), "more_body": True})
            self._body.clear()
        self._body += part
        self._length += len(part)

    async def answer(self, answer: Answer) -> None:
        self.is_answered = True
        self._answered.set()
        for message in answer.messages()[self._is_passed_on :]:  # without the start, if that has been sent
            await self._send(message)
