"""Idempotency: what is required of requests, and how they are done once. A FastAPI dependency, or called by itself."""

from collections.abc import Callable
from enum import Enum
from typing import Any

from starlette.requests import Request

from txbox.errors import InvalidConfiguration
from txbox.leases.handlers import is_coroutine_function
from txbox.messages.message import time_of_id
from txbox_http.exchange import Exchange
from txbox_http.keys import InvalidKey, key_of, message_id, request_fingerprint
from txbox_http.problems import DOCUMENTATION, problem
from txbox_http.strength import Answered, KeyedRequest, Strength

MAX_REQUEST_BYTES = 1_048_576
"""The largest body of a request with a key."""

EXCHANGES = "txbox_http"
"""The key in a request's scope for the exchanges of its middlewares, by ``Idempotency``."""


class Everyone(Enum):
    """The result of ``everyone``: not a name, and not None, which a function returns that has found no name."""

    EVERYONE = "everyone"


Caller = Callable[[Request], str | Everyone]
"""Names who sends a request, so that each caller has keys of its own."""


def everyone(request: Request) -> Everyone:  # noqa: ARG001 - a Caller
    """Treat all callers as one: the key is the message id, and whoever knows a key can get its response."""
    return Everyone.EVERYONE


def below_400(status: int) -> bool:
    """Return whether a status says that something was done."""
    return status < 400


class Idempotency:
    """Does requests with the header Idempotency-Key once, as in draft-ietf-httpapi-idempotency-key-header.

    ::

        once = Idempotency(InTransaction(sessions, Inbox("billing")), caller=user_of)
        app.add_middleware(IdempotencyMiddleware, once)

        @app.post("/purchases")
        async def purchase(order: Order, session: Annotated[AsyncSession, Depends(once)]) -> Receipt: ...

    The application needs the middleware, which holds the response until its effect has committed.
    """

    def __init__(
        self,
        strength: Strength,
        *,
        caller: Caller,
        required: bool = True,
        documentation: str = DOCUMENTATION,
        fingerprint: Callable[[Any, bytes], bytes] = request_fingerprint,
        keeps: Callable[[int], bool] = below_400,
        max_request_bytes: int = MAX_REQUEST_BYTES,
    ) -> None:
        """Set how requests are done once.

        Args:
            strength: ``InTransaction`` or ``UnderLease``.
            caller: names who sends a request, by something that stays when a token is renewed, such as a user's id.
                Callers do not see each other's responses. Use ``everyone`` behind a gateway, where there is only one
                caller.
            required: whether a request without a key is refused; otherwise it runs, and a repeat runs again.
            documentation: the service's page that its problems link to.
            fingerprint: given the ASGI scope and the body, returns what distinguishes a request from others with its
                key.
            keeps: given a status, returns whether the effect stays and the answer is kept. Otherwise everything is
                rolled back, the key is free, and a repeat runs again.
            max_request_bytes: the largest body of a request; larger ones are refused.

        Raises:
            InvalidConfiguration: an argument cannot work.
        """
        for name, function in (("caller", caller), ("fingerprint", fingerprint), ("keeps", keeps)):
            if not callable(function):
                raise InvalidConfiguration(f"Idempotency.{name} must be a function, not {function!r}")
            if is_coroutine_function(function):
                raise InvalidConfiguration(
                    f"Idempotency.{name} must be a plain function, not a coroutine function; a dependency that has to "
                    "await its caller calls: await once.begin(request, caller)"
                )
        self._strength = strength
        self._caller = caller
        self._required = required
        self._fingerprint = fingerprint
        self.documentation = documentation
        self.keeps = keeps
        self.max_request_bytes = max_request_bytes

    async def __call__(self, request: Request) -> Any:
        """Begin a request and return what its handler works with. For ``Depends``, or called by a handler.

        Returns:
            The session or the lease; for a request that was begun already, the same one.

        Raises:
            Answered: it was done before, or must not be done. The middleware sends its answer, whatever the application
                makes of this error.
            InvalidConfiguration: the application lacks the middleware, or ``caller`` has returned no name.
        """
        exchange = self._exchange(request)
        return self.current(request) if exchange.is_begun else await self.begin(request, self._caller(request))

    async def begin(self, request: Request, caller: str | Everyone) -> Any:
        """Begin a request of a caller that the application itself has identified; raises like ``__call__``."""
        exchange = self._exchange(request)
        if exchange.is_begun or exchange.is_answered:
            raise InvalidConfiguration("begin a request once, and before it is answered")
        try:
            return await self._begin(request, caller, exchange)
        except Answered as refusal:
            exchange.refuse(refusal)
            raise

    async def _begin(self, request: Request, caller: str | Everyone, exchange: Exchange) -> Any:
        try:
            key = key_of(request.scope["headers"])
        except InvalidKey as error:
            raise self._problem("key-invalid", f"{error}.") from error
        if key is None:
            if self._required:
                raise self._problem("key-missing", "This operation needs the header: a new UUID for each request.")
            exchange.begin(await self._strength.begin_without_key())
            return self.current(request)
        if caller is None:
            raise InvalidConfiguration(
                "this request has no caller, but None: refuse it before, or return everyone(request) where it may "
                "share its keys, and what was answered to them, with all others"
            )
        body = await exchange.read_body()
        if body is None:
            raise self._problem("request-too-large", f"At most {self.max_request_bytes:,} bytes are taken.")
        exchange.begin(
            await self._strength.begin(
                KeyedRequest(
                    request,
                    message_id(key, None if caller is Everyone.EVERYONE else caller),
                    time_of_id(key),
                    body,
                    self._fingerprint(request.scope, body),
                    self.documentation,
                )
            )
        )
        return self.current(request)

    def current(self, request: Request) -> Any:
        """Return the session or the lease of a request that was begun; None if it came without a key and has none."""
        exchange = self._exchange(request)
        exchange.note_handler(request)
        work = exchange.work
        return None if work is None else work.subject

    def _exchange(self, request: Request) -> Exchange:
        exchange: Exchange | None = request.scope.get(EXCHANGES, {}).get(self)
        if exchange is None:
            raise InvalidConfiguration(
                "the application needs the middleware: app.add_middleware(IdempotencyMiddleware, once)"
            )
        return exchange

    def _problem(self, kind: str, detail: str) -> Answered:
        return Answered(problem(kind, detail, self.documentation))
