"""A relay that sends to a broker which fails in every way it can, over real HTTP."""

import json
import random
from collections import defaultdict
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest
from sqlalchemy import Engine

from support.aws.boto3_settings import attempts
from support.aws.outgoing import BUS, FIFO_QUEUE, QUEUE, TOPIC
from support.aws.scripted_aws import (
    CONFIRMED,
    GARBAGE,
    HANG,
    OMITTED,
    RESET,
    Answer,
    Error,
    Failed,
    ScriptedAws,
    Sent,
    confirm,
    each,
)
from support.waiting import wait_until
from support.workers.memory_worker import at_work
from txbox.backoff import Backoff
from txbox.outbox import Outbox, Outgoing
from txbox.relay import Relay, scheduler
from txbox_aws.publishers import AwsPublisher, aws_publishers

SHORT = Backoff(first_seconds=0.01, longest_seconds=0.05)


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedAws]:
    broker = ScriptedAws()
    monkeypatch.setenv("AWS_ENDPOINT_URL", broker.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    attempts(monkeypatch, 1)
    monkeypatch.setattr(scheduler, "OUTAGE_BACKOFF", SHORT)
    yield broker
    broker.close()


@pytest.fixture
def publishers(broker: ScriptedAws) -> Iterator[dict[str, AwsPublisher]]:
    publishers = aws_publishers(read_timeout_seconds=0.3)
    yield publishers
    for publisher in publishers.values():
        publisher.close()


def publish(engine: Engine, messages: list[Outgoing]) -> list[str]:
    with engine.begin() as connection:
        return Outbox().publish_many(connection, messages)


def left(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.exec_driver_sql("SELECT count(*) FROM outbox_message").scalar_one())


class Trouble:
    """Answers that are wrong by chance, and then in every way in turn."""

    CALLS: tuple[Answer, ...] = (
        Error("ThrottlingException"),
        Error("RequestThrottled"),
        Error("ServiceUnavailable", 503),
        Error("InvalidParameterValue"),
        RESET,
        GARBAGE,
        HANG,
    )
    ENTRIES = (OMITTED, Failed("InternalError"), Failed("InternalFailure"), Failed("ThrottlingException"))

    def __init__(self) -> None:
        self._random = random.Random(4)
        self._calls, self._entries = cycle(self.CALLS), cycle(self.ENTRIES)
        self.met: set[Any] = set()

    def __call__(self, sent: Sent) -> Answer:
        if self._random.random() < 0.25:
            answer = next(self._calls)
            self.met.add(answer)
            return answer
        results = [next(self._entries) if self._random.random() < 0.15 else CONFIRMED for _ in sent.entries]
        self.met.update(results)
        return results


def test_through_all_trouble_everything_arrives_under_its_id_and_in_the_order_of_its_key(
    engine: Engine, broker: ScriptedAws, publishers: dict[str, AwsPublisher]
) -> None:
    trouble = broker.answer = Trouble()
    destinations = [QUEUE, FIFO_QUEUE, TOPIC, BUS]
    messages = [
        Outgoing(destination, json.dumps({"key": f"{destination} {key}", "number": number}), key=f"k{key}")
        for number in range(12)
        for key in range(9)
        for destination in destinations
    ]
    messages += [Outgoing(destination, json.dumps({"key": None})) for destination in destinations for _ in range(10)]
    ids = publish(engine, messages)
    relay = Relay(engine, publishers, max_attempts=None, backoff=SHORT)
    with at_work(relay):
        wait_until(lambda: left(engine) == 0, "all is sent", timeout=60, every=0.05)
    assert trouble.met == {*Trouble.CALLS, *Trouble.ENTRIES, CONFIRMED}
    published = dict(zip(ids, (str(message.body) for message in messages), strict=True))
    assert {entry.message_id: entry.body for entry in broker.taken} == published
    firsts: dict[str, list[int]] = defaultdict(list)
    seen = set()
    for entry in broker.taken:
        body = json.loads(entry.body)
        if entry.message_id not in seen and body["key"] is not None:
            firsts[body["key"]].append(body["number"])
        seen.add(entry.message_id)
    assert len(firsts) == 36
    assert all(numbers == list(range(12)) for numbers in firsts.values()), firsts
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM dead_letter").scalar_one() == 0


@pytest.mark.parametrize(
    ("failed", "attempts"),
    [(Failed("InvalidParameterValue"), 3), (OMITTED, 3), (Failed("InvalidMessageContents", sender_fault=True), 1)],
)
@pytest.mark.parametrize("destination", [FIFO_QUEUE, TOPIC])
def test_what_is_refused_for_the_last_time_is_a_dead_letter_and_lets_the_next_pass(
    engine: Engine,
    broker: ScriptedAws,
    publishers: dict[str, AwsPublisher],
    destination: str,
    failed: Any,
    attempts: int,
) -> None:
    broker.answer = each(poison=failed)
    beside = [Outgoing(destination, b"{}", message_id=f"beside-{number}") for number in range(3)]
    publish(
        engine,
        [
            *beside,
            Outgoing(destination, b"{}", key="k", message_id="poison"),
            Outgoing(destination, b"{}", key="k", message_id="next"),
        ],
    )
    relay = Relay(engine, publishers, max_attempts=3, backoff=SHORT)
    with at_work(relay):
        wait_until(lambda: left(engine) == 0, "all is sent or dead", every=0.05)
    with engine.connect() as connection:
        (letter,) = connection.exec_driver_sql("SELECT message_id, source, attempts FROM dead_letter").fetchall()
    assert tuple(letter) == ("poison", destination, attempts)
    assert sum("poison" in call.ids for call in broker.calls) == attempts
    confirmed = [entry.message_id for entry in broker.taken if entry.message_id != "poison"]
    assert sorted(confirmed) == ["beside-0", "beside-1", "beside-2", "next"]


@pytest.mark.parametrize("destination", [QUEUE, TOPIC, BUS])
def test_an_entry_that_the_broker_itself_has_failed_costs_no_attempt_and_keeps_its_place(
    engine: Engine, broker: ScriptedAws, publishers: dict[str, AwsPublisher], destination: str
) -> None:
    broker.answer = each(unlucky=Failed("InternalFailure"))
    publish(engine, [Outgoing(destination, b"{}", key="k", message_id=name) for name in ("unlucky", "next")])
    relay = Relay(engine, publishers, max_attempts=1, backoff=SHORT)
    with at_work(relay):
        wait_until(lambda: sum("unlucky" in call.ids for call in broker.calls) >= 3, "it is tried again and again")
        assert [entry.message_id for entry in broker.taken if entry.message_id != "unlucky"] == []
        broker.answer = confirm
        wait_until(lambda: left(engine) == 0, "all is sent", every=0.05)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM dead_letter").scalar_one() == 0
