"""What ``idempotent`` refuses before any message comes, and what its decorated handlers look like."""

import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import create_engine

from txbox import InvalidConfiguration, Message
from txbox.leases import Lease, PostgresLedger, idempotent

# Nothing here gets as far as connecting.
LEDGER = PostgresLedger("mailing", engine=create_engine("postgresql+psycopg://127.0.0.1:1/none"))


def generator(message: Message) -> Iterator[int]:
    yield 1


async def async_generator(message: Message) -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize("handler", [generator, async_generator])
def test_generators_are_refused(handler: Callable[..., Any]) -> None:
    with pytest.raises(InvalidConfiguration, match="no generators"):
        idempotent(handler, ledger=LEDGER)
    with pytest.raises(InvalidConfiguration, match="no generators"):
        idempotent(ledger=LEDGER)(handler)


def test_a_lease_by_position_is_refused() -> None:
    def handler(message: Message, lease: Lease, /) -> None: ...

    with pytest.raises(InvalidConfiguration, match="positional-only"):
        idempotent(handler, ledger=LEDGER)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lease_seconds": 0.0009}, r"lease_seconds must be from 0\.001 to 604800, not 0\.0009"),
        ({"lease_seconds": float("nan")}, "lease_seconds must be"),
        ({"lease_seconds": 1e9}, "lease_seconds must be"),
        ({"wait_seconds": -1}, "wait_seconds must be at least 0"),
        ({"wait_seconds": float("nan")}, "wait_seconds must be at least 0"),
    ],
)
def test_lengths_that_cannot_work_are_refused_when_decorating(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidConfiguration, match=said):
        idempotent(lambda message: None, ledger=LEDGER, **options)


@pytest.mark.parametrize("arguments", [(), ("m",), (Message("m", b""), Message("n", b""))])
def test_there_has_to_be_one_message_unless_identify_says_what_the_id_is(arguments: tuple[Any, ...]) -> None:
    handler = idempotent(lambda *anything: None, ledger=LEDGER)
    # This ledger cannot be asked: nothing was acquired.
    with pytest.raises(InvalidConfiguration, match=rf"found {sum(map(is_message, arguments))} messages.*identify="):
        handler(*arguments)


def test_a_fingerprint_of_the_message_needs_one_message_too() -> None:
    handler = idempotent(lambda message_id: None, ledger=LEDGER, identify=str, fingerprint=True)
    with pytest.raises(InvalidConfiguration, match="fingerprint="):
        handler("m")


def is_message(argument: object) -> bool:
    return isinstance(argument, Message)


def test_a_decorated_handler_takes_what_the_handler_takes_but_the_lease() -> None:
    def handler(message: Message, greeting: str = "hello", *, lease: Lease) -> int:
        return lease.fence

    async def handler_async(message: Message, *, lease: Lease) -> int:
        """Handle it."""
        return lease.fence

    class Owner:
        method_async = idempotent(ledger=LEDGER)(handler_async)

    assert str(inspect.signature(idempotent(handler, ledger=LEDGER))) == (
        "(message: txbox.messages.message.Message, greeting: str = 'hello') -> int"
    )
    assert list(inspect.signature(idempotent(handler_async, ledger=LEDGER)).parameters) == ["message"]
    decorated = idempotent(handler_async, ledger=LEDGER)
    assert (decorated.__name__, decorated.__doc__) == ("handler_async", "Handle it.")
    assert inspect.iscoroutinefunction(decorated)
    assert inspect.iscoroutinefunction(Owner().method_async)
