"""The port: how strongly a request is done once."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol, cast

import anyio
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from txbox.leases.handlers import is_coroutine_function
from txbox_http.answer import REPLAYED, Answer
from txbox_http.problems import PROCESSED

MAX_RESPONSE_BYTES = 1_048_576
"""The largest body of a response that is kept."""

Processed = Callable[[Request, Any], Response | Awaitable[Response]]
"""Makes the response to a request whose effect is there but whose response was not kept."""


class Answered(Exception):
    """The request is not run: ``answer`` is sent instead of the application's response."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        super().__init__(f"the request is not run; it is answered with {answer.status}")


@dataclass(frozen=True, slots=True)
class KeyedRequest:
    """A request with a key.

    Attributes:
        request: the request.
        message_id: made from its key.
        sent_at: when its key was made, if the key shows that.
        body: the whole body.
        fingerprint: the SHA-256 that distinguishes it from others.
        documentation: the page that problems link to.
    """

    request: Request
    message_id: str
    sent_at: datetime | None
    body: bytes
    fingerprint: bytes
    documentation: str


class Work(Protocol):
    """A request in progress.

    Attributes:
        subject: what its handler is given: a session or a lease.
        max_response_bytes: the largest response that is held and kept; None means any size.
        may_run_again: whether Postgres undoes all of it if it conflicts with another transaction, or if its response
            cannot be kept.
    """

    subject: Any
    max_response_bytes: int | None
    may_run_again: bool

    async def finish(self, answer: Answer, *, done: bool) -> None:
        """Settle the request before it is answered. If ``done``, its effect stays and its answer is kept."""

    async def abandon(self, error: BaseException) -> None:
        """Give the request up after an error. A second call, or one after ``finish``, changes nothing."""


class Strength(Protocol):
    """How a request is done once."""

    async def begin(self, keyed: KeyedRequest) -> Work:
        """Begin the work of a request.

        Raises:
            Answered: it was done before, or must not be done.
        """

    async def begin_without_key(self) -> Work | None:
        """Begin the work of a request that came without a key, if allowed; return None if there is nothing to begin."""


async def until_done(call: "asyncio.Future[Any]") -> asyncio.CancelledError | None:
    """Wait for a call to end, however often the request is cancelled meanwhile; return the last cancellation."""
    # Workers have their own function (txbox_workers.coroutines): they lack anyio, and this package needs no worker.
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):  # does not shield from asyncio's task.cancel()
        while not call.done():
            try:
                await asyncio.wait([call])
            except asyncio.CancelledError as error:
                cancelled = error
    return cancelled


async def processed_answer(processed: Processed | None, request: Request, subject: Any) -> Answer:
    """Return the answer if the effect is there but no response is kept."""
    if processed is None:
        return PROCESSED
    if is_coroutine_function(processed):
        response = await cast("Awaitable[Response]", processed(request, subject))
    else:
        response = cast(Response, await run_in_threadpool(processed, request, subject))
    return Answer(response.status_code, (*response.raw_headers, REPLAYED), bytes(response.body))
