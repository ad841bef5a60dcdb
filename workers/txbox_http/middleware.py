"""The middleware: run the application for a request, and answer once the request's work is settled.

::

    the request ─▶ the middleware ─▶ the application: once(request) ─┬─ first: the handler ─▶ its response is held
                                                                   └─ a repeat, or a problem: ``Answered``
    the answer ◀── after the commit ◀────────────────────────────────── or after the rollback

After a serialization failure or a deadlock, the application runs again with the kept body, as a worker does.
"""

import itertools
from collections.abc import Callable, Iterator

import anyio
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from txbox.backoff import Backoff
from txbox.postgres.sqlstates import is_retryable
from txbox_http.exchange import Exchange, NotWhole
from txbox_http.idempotency import EXCHANGES, Idempotency
from txbox_http.problems import conflict
from txbox_http.strength import Answered

RUNS = 6
"""How often a request runs that conflicts with other transactions."""

BACKOFF = Backoff(first_seconds=0.02, longest_seconds=0.5)
"""The delay between those runs."""


def posts_and_patches(request: Request) -> bool:
    """Return whether the request's method is POST or PATCH, which HTTP does not call idempotent."""
    return request.method in ("POST", "PATCH")


class _Covered(Request):
    """The request that ``covers`` looks at: no handler has asked for it."""


class IdempotencyMiddleware:
    """Makes ``Idempotency`` work for an application of Starlette or FastAPI."""

    def __init__(self, app: ASGIApp, once: Idempotency, *, covers: Callable[[Request], bool] | None = None) -> None:
        """Wrap an application.

        Args:
            app: the application.
            once: what is required of requests.
            covers: says which requests are done once before the application sees them, such as ``posts_and_patches``;
                the application finds the session or the lease by ``once.current(request)``. None means those whose
                handlers ask for it.
        """
        self._app = app
        self._once = once
        self._covers = covers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange(
            receive,
            send,
            max_request_bytes=self._once.max_request_bytes,
            keeps=self._once.keeps,
            documentation=self._once.documentation,
        )
        scope[EXCHANGES] = {**scope.get(EXCHANGES, {}), self._once: exchange}
        before = dict(scope)
        for run in itertools.count(1):
            error = await self._run(scope, exchange)
            if error is None:
                return
            if isinstance(error, Answered):
                await exchange.answer(error.answer)
                return
            if exchange.is_answered or not _may_run_again(exchange, error):
                raise error
            if run == RUNS or not exchange.rewind():
                await exchange.answer(conflict(self._once.documentation))
                return
            await anyio.sleep(BACKOFF.seconds(run))
            scope.clear()  # code around this middleware uses the same scope
            scope.update(before)

    async def _run(self, scope: Scope, exchange: Exchange) -> BaseException | None:
        """Run the application once; return its error, after giving its work up."""
        try:
            if self._covers is not None:
                request = _Covered(scope, exchange.receive)
                if self._covers(request):
                    await self._once(request)
            await self._app(scope, exchange.receive, exchange.send)
            if exchange.failure is None and exchange.refusal is None:
                await exchange.end()
            if exchange.refusal is None and (exchange.work is None or exchange.is_answered):
                return None
            error = (
                exchange.refusal
                or exchange.failure
                or NotWhole("the application has returned without a whole response")
            )
        except BaseException as raised:  # noqa: BLE001 - it is raised again, unless it has an answer
            error = exchange.refusal or exchange.failure or raised
            if isinstance(raised, Exception) and error is raised and not _may_run_again(exchange, error):
                try:
                    await exchange.end_with_error()
                except Exception as failed:  # noqa: BLE001 - it is raised, with the first one as its context
                    error = failed
        if exchange.work is not None:
            with anyio.CancelScope(shield=True):
                await exchange.work.abandon(exchange.as_unknown(error))
        return error


def _may_run_again(exchange: Exchange, error: BaseException) -> bool:
    """Return whether Postgres has undone all of a request in favour of others. Task groups may wrap the error."""
    return exchange.work is not None and exchange.work.may_run_again and any(map(is_retryable, _leaves(error)))


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from _leaves(one)
    else:
        yield error
