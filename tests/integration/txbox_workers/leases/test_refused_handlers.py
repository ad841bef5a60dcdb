"""Handlers, and options beside them, that cannot work: a worker refuses them."""

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from support.memory_worker import delivery, process
from txbox import DeadLetters, Inbox, InvalidConfiguration, Message, Outcome
from txbox.leases import PostgresLedger
from txbox_workers.memory import MemorySource
from txbox_workers.worker import Worker

pytestmark = pytest.mark.usefixtures("short_pauses")


async def coroutine_function(message: Message) -> None: ...


def generator_function(session: Session, message: Message) -> Any:
    yield


class CallableCoroutine:
    async def __call__(self, message: Message) -> None: ...


@pytest.mark.parametrize("kept_by", ["ledger", "inbox"])
def test_a_handler_that_returns_something_to_await_has_failed(
    engine: Engine, ledger: PostgresLedger, kept_by: str
) -> None:
    options: dict[str, Any] = {"ledger": ledger} if kept_by == "ledger" else {"inbox": Inbox("mailing")}
    worker = Worker(
        MemorySource(),
        engine=engine,
        handler=lambda *given: coroutine_function(given[-1]),
        max_attempts=1,
        **options,
    )
    assert process(worker, delivery("x")) == [("x-1", Outcome.DEAD)]
    (letter,) = DeadLetters(engine).list()
    assert "so its work is not done" in letter.error


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"ledger": None}, "needs an inbox, or a ledger, or both"),
        ({"ledger": None, "inbox": Inbox("mailing")}, "needs the engine of its inbox"),
        ({"handler": None}, "either handler or batch_handler"),
        ({"handler": "mail"}, r"Worker\.handler must be a function, not str"),
        ({"handler": coroutine_function}, "must be a plain function"),
        ({"handler": generator_function}, "must be a plain function"),
        ({"handler": CallableCoroutine()}, "must be a plain function"),
        ({"handler": lambda session, message: None}, r"is called with \(message\) here"),
        ({"handler": lambda lease, message: None}, "has to be its last one"),
        ({"inbox": Inbox("mailing"), "engine": "any", "handler": lambda message: None}, r"\(session, message\)"),
        (
            {
                "ledger": None,
                "inbox": Inbox("mailing"),
                "engine": "any",
                "handler": None,
                "batch_handler": generator_function,
            },
            r"Worker\.batch_handler must be a plain function",
        ),
        ({"ledger": Inbox("mailing")}, r"Worker\.ledger must be a ledger"),
        ({"ledger": PostgresLedger}, "not PostgresLedger"),
        ({"engine": "postgresql://"}, r"Worker\.engine must be an Engine, not str"),
        ({"lease_seconds": "30"}, r"Worker\.lease_seconds must be from"),
        ({"handler": None, "batch_handler": print}, "with a ledger needs handler"),
        ({"inbox": Inbox("billing"), "engine": "any"}, "an inbox of billing and a ledger of mailing"),
        ({"lease_seconds": 0}, r"Worker\.lease_seconds must be from"),
        ({"ledger": None, "inbox": Inbox("mailing"), "engine": "any", "fingerprint": True}, "the ledger's"),
        ({"max_attempts": 0}, r"Worker\.max_attempts"),
    ],
)
def test_what_cannot_work_is_refused_at_once(
    engine: Engine, ledger: PostgresLedger, options: dict[str, Any], text: str
) -> None:
    handler: Callable[..., object] = print
    arguments: dict[str, Any] = {"ledger": ledger, "handler": handler, **options}
    if arguments.get("engine") == "any":
        arguments["engine"] = engine
    with pytest.raises(InvalidConfiguration, match=text):
        Worker(MemorySource(), **arguments)
