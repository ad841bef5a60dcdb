"""The decorator ``idempotent``: run a handler once per message, although no transaction covers what it does.

::

    ledger = PostgresLedger("mailing", engine=engine)

    @idempotent(ledger=ledger)
    def send_mail(message): ...

The handler runs again if it raised. It also runs again if its process was killed, or lost its store, before the message
was completed: the next owner gets the lease once it has run out, and ``Lease.unknown_attempts`` counts the attempts
that may have had their effect.

(IETF draft-ietf-httpapi-idempotency-key-header, "The Idempotency-Key HTTP Header Field", describes the same for
requests: first, retried, concurrent, and another payload under the same key.)
"""

import asyncio
import inspect
import json
from collections.abc import Callable
from datetime import datetime
from functools import wraps
from typing import Any, ParamSpec, TypeVar, overload

from txbox.errors import InvalidConfiguration
from txbox.leases.handlers import has_lease_parameter, is_coroutine_function, signature_of
from txbox.leases.lease import LEASE_SECONDS, Lease
from txbox.leases.ledger import Ledger
from txbox.leases.runner import LeaseRunner, refuse_expired
from txbox.messages.message import Message, earliest, time_of_id
from txbox.messages.message import fingerprint as sha256

P = ParamSpec("P")
R = TypeVar("R")


@overload
def idempotent(
    handler: Callable[P, R],
    /,
    *,
    ledger: Ledger,
    identify: Callable[..., str] | None = None,
    lease_seconds: float = LEASE_SECONDS,
    wait_seconds: float = 0.0,
    fingerprint: bool | Callable[..., bytes | str] = False,
    keep_result: bool = True,
    encode: Callable[[Any], bytes | str] | None = None,
    decode: Callable[[bytes], Any] = json.loads,
) -> Callable[P, R]: ...


@overload
def idempotent(
    *,
    ledger: Ledger,
    identify: Callable[..., str] | None = None,
    lease_seconds: float = LEASE_SECONDS,
    wait_seconds: float = 0.0,
    fingerprint: bool | Callable[..., bytes | str] = False,
    keep_result: bool = True,
    encode: Callable[[Any], bytes | str] | None = None,
    decode: Callable[[bytes], Any] = json.loads,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def idempotent(
    handler: Callable[..., Any] | None = None,
    /,
    *,
    ledger: Ledger,
    identify: Callable[..., str] | None = None,
    lease_seconds: float = LEASE_SECONDS,
    wait_seconds: float = 0.0,
    fingerprint: bool | Callable[..., bytes | str] = False,
    keep_result: bool = True,
    encode: Callable[[Any], bytes | str] | None = None,
    decode: Callable[[bytes], Any] = json.loads,
) -> Any:
    """Make a function or coroutine function run once per message. Use it as a decorator, or call it.

    The first call runs the handler and keeps its result. After that, calls for the same message return the kept result
    without running the handler.

    Args:
        handler: what to run once. If it has a parameter ``lease``, it gets its ``Lease``.
        ledger: where leases live. Use one per function: the key is the message's id, not the function.
        identify: gets the handler's arguments and returns the message's id; None: the id of the ``Message`` among them.
        lease_seconds: how long the message stays with an owner that has died. It is renewed while a slow handler runs.
        wait_seconds: how long to wait for another owner that is working on the message.
        fingerprint: refuse another payload under the same id. True compares the body of the ``Message``; a function
            gets the handler's arguments and returns the payload.
        keep_result: whether to keep what the handler returns for repeats; otherwise they get None.
        encode: turns a result into bytes or text; by default JSON, which turns a tuple into a list. None is not
            encoded.
        decode: turns the bytes back into a result.

    Returns:
        A function or coroutine function with the handler's arguments except ``lease``. Besides what the handler raises,
        after which the message is free, it raises:

        - ``InFlight``: another owner is working on the message.
        - ``Mismatch``: another payload came under this id before.
        - ``Expired``: the message, or its id of version 7, is from before the horizon: too old to judge.
        - ``LeaseLost``: the handler ran for so long, without a successful renewal, that another owner has begun.
        - ``LedgerError``: the store cannot be reached. If the handler has run, it may run again.
        - ``ResultNotStored``: the handler has run and the message is completed, but its result cannot be kept.

    Raises:
        InvalidConfiguration: an argument cannot work.
    """
    if handler is None:
        return lambda decorated: idempotent(
            decorated,
            ledger=ledger,
            identify=identify,
            lease_seconds=lease_seconds,
            wait_seconds=wait_seconds,
            fingerprint=fingerprint,
            keep_result=keep_result,
            encode=encode,
            decode=decode,
        )
    for name, function in (("handler", handler), ("identify", identify), ("encode", encode), ("decode", decode)):
        if function is not None and not callable(function):
            raise InvalidConfiguration(f"idempotent takes a function as {name}, not {function!r}")
    parts = (handler, type(handler).__call__)
    if any(inspect.isgeneratorfunction(part) or inspect.isasyncgenfunction(part) for part in parts):
        raise InvalidConfiguration("idempotent takes no generators: their work is done after they have returned")
    runner = LeaseRunner(
        ledger,
        lease_seconds=lease_seconds,
        wait_seconds=wait_seconds,
        keep_result=keep_result,
        encode=encode,
        decode=decode,
    )
    run = handler
    wants_lease = has_lease_parameter(handler)

    def about(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, bytes | None]:
        message_id = _message(args, kwargs).id if identify is None else identify(*args, **kwargs)
        if fingerprint is False:
            return message_id, None
        payload = _message(args, kwargs).body if fingerprint is True else fingerprint(*args, **kwargs)
        return message_id, sha256(payload)

    if is_coroutine_function(handler):

        @wraps(handler)
        async def once_async(*args: Any, **kwargs: Any) -> Any:
            message_id, digest = about(args, kwargs)

            async def work(lease: Lease) -> Any:
                await asyncio.to_thread(refuse_expired, ledger, lease, _sent_at(args, kwargs))
                lease.begin_work()
                return await run(*args, **kwargs, **({"lease": lease} if wants_lease else {}))

            return (await runner.run_async(message_id, work, fingerprint=digest)).result

        return _without_lease(once_async, handler) if wants_lease else once_async

    @wraps(handler)
    def once(*args: Any, **kwargs: Any) -> Any:
        message_id, digest = about(args, kwargs)

        def work(lease: Lease) -> Any:
            refuse_expired(ledger, lease, _sent_at(args, kwargs))
            lease.begin_work()
            return run(*args, **kwargs, **({"lease": lease} if wants_lease else {}))

        return runner.run(message_id, work, fingerprint=digest).result

    return _without_lease(once, handler) if wants_lease else once


def _without_lease(decorated: Callable[..., Any], handler: Callable[..., Any]) -> Callable[..., Any]:
    """Hide the parameter ``lease`` from the signature of a decorated handler, since the decorator supplies it."""
    signature = signature_of(handler)
    assert signature is not None  # noqa: S101 - for the type checker: it has a parameter
    parameters = [parameter for name, parameter in signature.parameters.items() if name != "lease"]
    decorated.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return decorated


def _sent_at(args: tuple[Any, ...], kwargs: dict[str, Any]) -> datetime | None:
    messages = [value for value in (*args, *kwargs.values()) if isinstance(value, Message)]
    return earliest(*(time for message in messages for time in (message.sent_at, time_of_id(message.id))))


def _message(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Message:
    found = [value for value in (*args, *kwargs.values()) if isinstance(value, Message)]
    if len(found) != 1:
        raise InvalidConfiguration(
            f"idempotent found {len(found)} messages among the handler's arguments, and needs one; take the Message, "
            "or say with identify= what the id is, and with a function as fingerprint= what the payload is"
        )
    return found[0]
