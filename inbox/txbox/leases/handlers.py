"""Handlers: whether they take a lease, and whether their work is done when they return."""

import asyncio
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from txbox.errors import InvalidConfiguration

PLAIN = (
    "make it a plain function, which calls asyncio.run(…) if need be; idempotent also takes the coroutine function "
    "itself"
)
"""Advice for a handler whose work is not done when it returns."""


def is_coroutine_function(handler: Any) -> bool:
    """Return whether a call of a handler returns something to await.

    True for a coroutine function, an object whose ``__call__`` is one, a partial of either, or a function marked as
    one: by asyncio before Python 3.12, and by ``inspect`` since then.
    """
    while isinstance(handler, functools.partial):
        handler = handler.func
    mark = getattr(asyncio.coroutines, "_is_coroutine", None)
    return (
        inspect.iscoroutinefunction(handler)
        or inspect.iscoroutinefunction(type(handler).__call__)
        or (mark is not None and getattr(handler, "_is_coroutine", None) is mark)
    )


def signature_of(handler: Callable[..., Any]) -> inspect.Signature | None:
    """Return a handler's signature; None for C functions that do not have one.

    Since Python 3.14, annotations are evaluated on access. A name that is imported only for the type checker would
    raise NameError; here it becomes a ``ForwardRef``.
    """
    try:
        if sys.version_info >= (3, 14):
            from annotationlib import Format

            return inspect.signature(handler, annotation_format=Format.FORWARDREF)
        return inspect.signature(handler)
    except (TypeError, ValueError):
        return None


def has_lease_parameter(handler: Callable[..., Any]) -> bool:
    """Return whether a handler has a parameter ``lease``; raise ``InvalidConfiguration`` if it is positional-only."""
    signature = signature_of(handler)
    if signature is None:
        return False
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
    """Raise ``InvalidConfiguration`` if a result means unfinished work: a generator, or something to await.

    ``of`` and ``instead`` tell the error whose result it is and what to do instead.
    """
    if result is None or not (inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result)):
        return
    if inspect.iscoroutine(result):
        result.close()  # or Python warns that it was never awaited
    raise InvalidConfiguration(f"{of} has returned a {type(result).__name__}, so its work is not done; {instead}")
