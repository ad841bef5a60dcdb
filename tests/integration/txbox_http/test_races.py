"""Requests at once: with one key, and with several that change the same row; at all isolation levels."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from support.waiting import wait_until
from support.web.service import buy, served, service
from support.workers.business import Business
from txbox import Inbox

STYLES_AND_LEVELS = [
    ("async dependency", "READ COMMITTED"),
    ("async dependency", "REPEATABLE READ"),
    ("async dependency", "SERIALIZABLE"),
    ("asyncpg dependency", "SERIALIZABLE"),
    ("sync middleware", "SERIALIZABLE"),
]
"""What the level decides is decided in the database, by the same statements in all styles."""


class Gate:
    """Holds handlers back whose purchase says "wait"."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.free = threading.Event()

    def __call__(self, then: str) -> None:
        if then == "wait":
            self.entered.set()
            assert self.free.wait(30)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.free.set()


@pytest.fixture(params=STYLES_AND_LEVELS, ids=" ".join)
def style_and_level(request: pytest.FixtureRequest) -> tuple[str, str]:
    style, level = request.param
    return style, level


@pytest.fixture
def patient(
    schema_url: str, business: Business, gate: Gate, style_and_level: tuple[str, str]
) -> Iterator[httpx2.Client]:
    """A service that waits for the other request."""
    inbox, (style, level) = Inbox("billing", wait_seconds=30), style_and_level
    with served(service(schema_url, style, then=gate, inbox=inbox, level=level)) as client:
        yield client


def test_one_of_two_requests_at_once_is_told_to_come_later(
    schema_url: str, business: Business, pool: ThreadPoolExecutor, gate: Gate, style_and_level: tuple[str, str]
) -> None:
    style, level = style_and_level
    with served(service(schema_url, style, then=gate, level=level)) as client:
        first = pool.submit(buy, client, "k1", then="wait")
        assert gate.entered.wait(30)
        second = buy(client, "k1", then="wait")
        gate.free.set()

        assert (second.status_code, second.headers["retry-after"]) == (409, "1")
        assert second.json()["title"] == "A request is outstanding for this Idempotency-Key"
        assert first.result().status_code == 201
        assert buy(client, "k1", then="wait").headers["idempotent-replayed"] == "true"
    assert business.applied() == {"tea": 1}


def test_one_that_waits_long_enough_gets_the_answer_of_the_other(
    patient: httpx2.Client, business: Business, pool: ThreadPoolExecutor, gate: Gate
) -> None:
    first = pool.submit(buy, patient, "k1", then="wait")
    assert gate.entered.wait(30)
    others = [pool.submit(buy, patient, "k1", then="wait") for _ in range(4)]
    waits = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND strpos(query, 'processed_message') > 0"
    wait_until(lambda: len(business.rows(waits)) >= 4, "they wait")
    gate.free.set()

    assert first.result().status_code == 201
    for other in others:
        response = other.result()
        assert (response.status_code, response.headers["idempotent-replayed"]) == (201, "true")
        assert response.content == first.result().content
    assert business.applied() == {"tea": 1}


def test_more_requests_than_threads_and_connections_queue_and_do_not_wait_for_each_other(
    schema_url: str, business: Business
) -> None:
    # Each holds its connection while it waits for a thread; the threads wait for connections.
    with served(service(schema_url, "sync dependency")) as client, ThreadPoolExecutor(100) as many:
        begun = time.monotonic()
        answers = list(many.map(lambda number: buy(client, f"k{number}", f"i{number}"), range(100)))
        assert time.monotonic() - begun < 20
    assert {answer.status_code for answer in answers} == {201}
    assert business.balance() == 100


def test_requests_that_change_the_same_row_are_run_again_and_all_succeed(
    patient: httpx2.Client, business: Business, pool: ThreadPoolExecutor
) -> None:
    answers = list(pool.map(lambda number: buy(patient, f"k{number % 10}", f"i{number % 10}"), range(20)))
    # Those that lose again and again are told to come later; nothing of them was done.
    for number, answer in enumerate(answers):
        if answer.status_code == 503:
            assert answer.json()["type"].endswith("#conflict")
            answers[number] = buy(patient, f"k{number % 10}", f"i{number % 10}")
    assert {answer.status_code for answer in answers} == {201}
    assert business.applied() == {f"i{number}": 1 for number in range(10)}
    assert business.balance() == 10
