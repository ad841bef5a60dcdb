"""Options that cannot work are refused when a worker is made; defaults; and the three lists of options agree."""

import asyncio
import inspect
import math
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from support.aws.queues import QUEUE
from txbox import DeadLetters, Inbox, InvalidConfiguration, Message
from txbox.leases import PostgresLedger
from txbox_aws.lambda_ import sqs_handler
from txbox_aws.sqs import SqsWorker
from txbox_workers.coroutines import AsyncWorker
from txbox_workers.coroutines.batch_tasks import LoopCalls
from txbox_workers.coroutines.worker import LoopWorker
from txbox_workers.memory_source import MemorySource
from txbox_workers.options import MAX_ATTEMPTS, ProcessingOptions, ValidOptions, WorkerOptions
from txbox_workers.polling.prefetching_poller import PrefetchingPoller
from txbox_workers.worker import Worker

ENGINE = create_engine("postgresql+psycopg://nowhere")
INBOX = Inbox("mailing")
LEDGER = PostgresLedger("mailing", engine=ENGINE)


async def coroutine_function(message: Message) -> None: ...


def generator_function(session: Session, message: Message) -> Any:
    yield


class CallableCoroutine:
    async def __call__(self, message: Message) -> None: ...


def returns_a_coroutine(message: Message) -> Any:
    return coroutine_function(message)


if sys.version_info >= (3, 12):
    inspect.markcoroutinefunction(returns_a_coroutine)
else:
    returns_a_coroutine._is_coroutine = asyncio.coroutines._is_coroutine


@pytest.mark.parametrize(
    "handler",
    [
        coroutine_function,
        CallableCoroutine(),
        partial(CallableCoroutine()),
        returns_a_coroutine,
        sync_to_async(lambda message: None),
    ],
)
def test_what_is_awaited_is_for_coroutine_workers_and_for_no_others(handler: Any) -> None:
    AsyncWorker(MemorySource(), ledger=LEDGER, handler=handler)
    with pytest.raises(InvalidConfiguration, match=r"plain function: .*; AsyncWorker takes coroutine functions"):
        Worker(MemorySource(), ledger=LEDGER, handler=handler)


BESIDE: dict[str, Any] = {"inbox": INBOX, "engine": ENGINE}
ALONE: dict[str, Any] = {**BESIDE, "ledger": None}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"ledger": None}, "needs an inbox, or a ledger, or both"),
        ({"ledger": None, "inbox": INBOX}, "needs the engine of its inbox"),
        ({"handler": None}, "^Worker needs one of handler, batch_handler and effect$"),
        ({**ALONE, "handler": None}, "^Worker needs one of handler, batch_handler and effect$"),
        ({**ALONE, "batch_handler": print}, "^Worker needs one of handler, batch_handler and effect$"),
        ({"handler": "mail"}, r"Worker\.handler must be a function, not str"),
        ({"handler": generator_function}, "must be a plain function"),
        ({"handler": lambda session, message: None}, r"is called with \(message\) here"),
        ({"handler": lambda lease, message: None}, "has to be its last one"),
        ({**BESIDE, "handler": lambda message: None}, r"\(session, message\)"),
        (
            {**ALONE, "handler": None, "batch_handler": generator_function},
            r"Worker\.batch_handler must be a plain function",
        ),
        ({"inbox": ENGINE}, r"Worker\.inbox must be an Inbox, not Engine"),
        ({"ledger": INBOX}, r"Worker\.ledger must be a ledger"),
        ({"ledger": PostgresLedger}, "not PostgresLedger"),
        ({"engine": "postgresql://"}, r"Worker\.engine must be an Engine, not str"),
        ({"dead_letters": ENGINE}, r"Worker\.dead_letters must be a DeadLetters, not Engine"),
        ({"engine": ENGINE}, r"Worker\.engine is the inbox's.*dead_letters=DeadLetters"),
        ({**BESIDE, "dead_letters": DeadLetters(ENGINE)}, r"Worker\.dead_letters is for a ledger alone"),
        ({"lease_seconds": "30"}, r"Worker\.lease_seconds must be from"),
        ({"lease_seconds": 0}, r"Worker\.lease_seconds must be from"),
        ({"handler": None, "batch_handler": print}, "with a ledger needs handler"),
        ({**BESIDE, "inbox": Inbox("billing")}, "an inbox of billing and a ledger of mailing"),
        ({**ALONE, "fingerprint": True}, "the ledger's"),
        ({"max_attempts": 0}, r"^Worker\.max_attempts must be at least 1, or None, not 0$"),
        ({"transactions": "all"}, r"^Worker\.transactions must be 'batch' or 'message', not 'all'$"),
        ({"threads": 0}, r"^Worker\.threads must be at least 1, not 0$"),
        ({"transaction_seconds": 0}, r"Worker\.transaction_seconds must be more than 0"),
        ({"transaction_seconds": -1}, r"Worker\.transaction_seconds must be more than 0"),
        ({"transaction_seconds": math.nan}, r"Worker\.transaction_seconds must be more than 0"),
    ],
)
def test_what_cannot_work_is_refused_at_once(options: dict[str, Any], text: str) -> None:
    arguments: dict[str, Any] = {"ledger": LEDGER, "handler": print, **options}
    with pytest.raises(InvalidConfiguration, match=text):
        Worker(MemorySource(), **arguments)


@pytest.mark.parametrize(
    "options",
    [
        {"handler": print, "threads": 1, "max_attempts": 1, "transactions": "message"},
        {"batch_handler": print, "max_attempts": None},
    ],
    ids=["handler", "batch_handler"],
)
def test_the_least_that_can_work_is_taken(options: dict[str, Any]) -> None:
    assert not Worker(MemorySource(), **BESIDE, **options).running


@pytest.mark.parametrize(
    ("make", "name", "unknown"),
    [
        (partial(Worker, MemorySource()), "Worker", ["thread", "of", "subscriber_id"]),
        (partial(SqsWorker, QUEUE), "SqsWorker", ["thread", "of"]),
        (sqs_handler, "sqs_handler", ["thread", "of", "threads", "backoff", "transaction_seconds"]),
    ],
)
def test_an_option_that_there_is_not_is_refused(make: Callable[..., Any], name: str, unknown: list[str]) -> None:
    for option in unknown:
        with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument '{option}'"):
            make(ledger=LEDGER, handler=print, **{option: None})
    with pytest.raises(TypeError, match=r"'max_attempt'; did you mean max_attempts\?$"):
        make(ledger=LEDGER, handler=print, max_attempt=3)


class OlderSource:
    """A source of the time when ``extend_visibility`` was ``extend``."""

    name, visibility_seconds = "older", 30.0

    def __getattr__(self, name: str) -> Any:
        if name not in {"open", "receive", "ack", "hand_back", "extend", "close"}:
            raise AttributeError(name)
        return print


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (OlderSource(), "^Worker.source must have all that a Source has; OlderSource lacks extend_visibility$"),
        (MemorySource, "^Worker.source must be a source, not the class MemorySource$"),
        ("https://queue", "str lacks ack, close, extend_visibility, hand_back, name, open, receive, visibility_second"),
    ],
)
def test_a_source_that_lacks_something_is_refused_before_it_is_needed(source: Any, text: str) -> None:
    with pytest.raises(InvalidConfiguration, match=text):
        Worker(source, ledger=LEDGER, handler=print)


@pytest.mark.parametrize(
    ("made", "options"), [(Worker, WorkerOptions), (SqsWorker, WorkerOptions), (sqs_handler, ProcessingOptions)]
)
def test_help_lists_the_options_with_their_defaults(made: Callable[..., Any], options: type) -> None:
    shown = inspect.signature(made).parameters
    assert "options" not in shown
    assert {name for name in shown if name in WorkerOptions.__annotations__} == set(options.__annotations__)
    assert shown["max_attempts"].default == MAX_ATTEMPTS


def test_each_typed_option_has_a_default_and_only_those() -> None:
    typed = {field.name: field.type for field in fields(ValidOptions) if field.init and field.name != "of"}
    assert typed == WorkerOptions.__annotations__
    assert set(WorkerOptions.__annotations__) - set(ProcessingOptions.__annotations__) == {
        "threads",
        "prefetch",
        "batch_size",
        "gather_seconds",
        "backoff",
        "transaction_seconds",
    }


@pytest.mark.parametrize(
    ("given", "visibility_seconds", "limit_seconds"),
    [(None, None, 60.0), (None, 30.0, 120.0), (None, 1.0, 60.0), (7.0, 30.0, 7.0), (math.inf, 30.0, None)],
)
def test_how_long_a_transaction_may_take(
    given: float | None, visibility_seconds: float | None, limit_seconds: float | None
) -> None:
    options = ValidOptions(of="Worker", ledger=LEDGER, handler=print, transaction_seconds=given)
    assert options.limit_seconds(visibility_seconds) == limit_seconds


def test_an_engine_for_coroutines_is_refused() -> None:
    engine = create_async_engine("postgresql+psycopg://nowhere")
    with pytest.raises(InvalidConfiguration, match=r"Worker\.engine must be one of create_engine"):
        Worker(MemorySource(), inbox=Inbox("billing"), engine=engine.sync_engine, handler=lambda session, message: None)
    for given in (engine, engine.sync_engine):
        with pytest.raises(InvalidConfiguration, match="also beside coroutines"):
            PostgresLedger("billing", engine=given)  # type: ignore[arg-type]


def test_a_worker_on_a_loop_receives_ahead_also_without_a_prefetch() -> None:
    """In its own threads, whatever waits for the database would wait for no loop."""
    worker = LoopWorker(MemorySource(), LoopCalls(), of="AsyncWorker", ledger=LEDGER, handler=print)
    assert isinstance(worker._make_poller(), PrefetchingPoller)
