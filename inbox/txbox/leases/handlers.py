"""Handlers that work under a lease: whether one takes it, and whether its work is done when it returns."""

import inspect
from collections.abc import Callable
from typing import Any

from txbox.errors import InvalidConfiguration

PLAIN = (
    "make it a plain function, which calls asyncio.run(…) if need be; idempotent also takes the coroutine function "
    "itself"
)
"""What to do about a handler whose work is not done when it returns."""


def has_lease_parameter(handler: Callable[..., Any]) -> bool:
    """Return whether a handler has a parameter ``lease``; raises ``InvalidConfiguration`` if it is positional only."""
    try:
        signature = inspect.signature(handler)
    except (TypeError, ValueError):
        return False  # some functions of C have no signature
    parameter = signature.parameters.get("lease")
    if parameter is not None and parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
        raise InvalidConfiguration("a handler takes its lease by name; its parameter lease is positional-only")
    if parameter is not None and parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
        *_, last = (each for each in signature.parameters.values() if each.kind is parameter.kind)
        if last is not parameter:
            raise InvalidConfiguration("a handler's parameter lease has to be its last one, or one by name only")
    return parameter is not None and parameter.kind in (
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    )


def refuse_unfinished(result: object, *, of: str = "the handler", instead: str = PLAIN) -> None:
    """Raise ``InvalidConfiguration`` for a result that means unfinished work: a generator, or something to await.

    The error says of whom it is the result, and what to do instead.
    """
    if result is None or not (inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result)):
        return
    if inspect.iscoroutine(result):
        result.close()  # else Python warns of it
    raise InvalidConfiguration(f"{of} has returned a {type(result).__name__}, so its work is not done; {instead}")
