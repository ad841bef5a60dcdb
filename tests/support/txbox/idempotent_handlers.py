"""Idempotent handlers of every kind."""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from sqlalchemy import create_engine

from txbox import Message
from txbox.leases import PostgresLedger, idempotent

MESSAGE = Message("m", b'{"to": "ann"}')


LONG = 600.0


def kinds(ledger: PostgresLedger, ran: list[Any]) -> dict[str, Callable[..., Any]]:
    """Handlers of every kind, already idempotent, for one message each."""
    once = idempotent(ledger=ledger)

    @once
    def function(message: Message, greeting: str = "hello", *, sign: bool = True) -> dict[str, Any]:
        ran.append((message, greeting, sign))
        return {"sent": greeting}

    @once
    async def coroutine_function(message: Message, greeting: str = "hello", *, sign: bool = True) -> dict[str, Any]:
        await asyncio.sleep(0)
        return function.__wrapped__(message, greeting, sign=sign)  # type: ignore[attr-defined, no-any-return]

    plain: Callable[..., Any] = function.__wrapped__  # type: ignore[attr-defined]
    plain_async: Callable[..., Any] = coroutine_function.__wrapped__  # type: ignore[attr-defined]

    class Object:
        def __call__(self, message: Message, greeting: str = "hello", *, sign: bool = True) -> Any:
            return plain(message, greeting, sign=sign)

    class AsyncObject:
        async def __call__(self, message: Message, greeting: str = "hello", *, sign: bool = True) -> Any:
            return plain(message, greeting, sign=sign)

    class Owner:
        @once
        def method(self, message: Message, greeting: str = "hello", *, sign: bool = True) -> Any:
            assert isinstance(self, Owner)
            return plain(message, greeting, sign=sign)

        @once
        async def async_method(self, message: Message, greeting: str = "hello", *, sign: bool = True) -> Any:
            return plain(message, greeting, sign=sign)

        @classmethod
        @once
        def class_method(cls, message: Message, greeting: str = "hello", *, sign: bool = True) -> Any:
            assert cls is Owner
            return plain(message, greeting, sign=sign)

        @staticmethod
        @once
        def static_method(message: Message, greeting: str = "hello", *, sign: bool = True) -> Any:
            return plain(message, greeting, sign=sign)

        def bare(self, message: Message, greeting: str = "hello", *, sign: bool = True) -> Any:
            return plain(message, greeting, sign=sign)

    return {
        "function": function,
        "coroutine function": coroutine_function,
        "called with the handler": idempotent(plain, ledger=ledger),
        "object": once(Object()),
        "async object": once(AsyncObject()),
        "method": Owner().method,
        "async method": Owner().async_method,
        "class method": Owner.class_method,
        "static method": Owner.static_method,
        "bound method": once(Owner().bare),
        "partial": once(functools.partial(plain, sign=True)),
        "partial of a coroutine function": once(functools.partial(plain_async, sign=True)),
        "lambda": once(lambda message, greeting="hello", sign=True: plain(message, greeting, sign=sign)),
    }


KINDS = list(kinds(PostgresLedger("nobody", engine=create_engine("postgresql+psycopg://")), []))


def result_of(answer: Any) -> Any:
    async def awaited(answer: Awaitable[Any]) -> Any:
        return await answer

    return asyncio.run(awaited(answer)) if asyncio.iscoroutine(answer) else answer
