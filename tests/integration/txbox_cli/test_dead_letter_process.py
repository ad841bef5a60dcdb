"""``txbox dead-letters redrive`` as processes that are killed: what the queue has got, counted against the rows."""

import json
import signal
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import Engine

from support.program import Ended, Running
from support.waiting import wait_until
from txbox import DeadLetter, DeadLetters, Reason
from txbox.dead_letters import LetterOperations

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

pytestmark = pytest.mark.chaos

LETTERS = 150
KILLS = 3
SLOWLY = ("--per-second", "5")
"""All three processes are killed long before the last letter, also where the machine stands still for seconds."""


def at_work(engine: Engine) -> int:
    """How many sessions have letters of an operation in hand."""
    with engine.connect() as connection:
        return int(
            connection.exec_driver_sql(
                "SELECT count(*) FROM pg_locks "
                "WHERE relation = 'dead_letter_selection'::regclass AND pid <> pg_backend_pid()"
            ).scalar_one()
        )


def drained(sqs: "SQSClient", queue: str) -> Counter[str]:
    """All ids that the queue holds, with how often."""
    found: Counter[str] = Counter()
    while messages := sqs.receive_message(
        QueueUrl=queue, MaxNumberOfMessages=10, MessageAttributeNames=["All"], VisibilityTimeout=600
    ).get("Messages"):
        found.update(message["MessageAttributes"]["message-id"]["StringValue"] for message in messages)
    return found


def test_processes_that_are_killed_send_no_committed_letter_twice(
    txbox: Callable[..., Ended], schema_url: str, engine: Engine, queue: str, sqs: "SQSClient"
) -> None:
    letters = DeadLetters(engine)
    ids = [f"m-{number:03}" for number in range(LETTERS)]
    for id_ in ids:
        letters.park(DeadLetter("billing", id_, Reason.FAILED, "no", 3, queue, b"{}"))
    env = {"TXBOX_DATABASE_URL": schema_url}

    def redriven() -> int:
        with engine.connect() as connection:
            return int(connection.exec_driver_sql("SELECT count(redriven_at) FROM dead_letter").scalar_one())

    with Running("dead-letters", "redrive", "--all", *SLOWLY, env=env) as first:
        wait_until(lambda: redriven() >= 1, "the first letter being sent", timeout=60)
        (operation,) = LetterOperations(engine).list()
        with Running("dead-letters", "resume", str(operation.operation_id), *SLOWLY, env=env) as second:
            wait_until(lambda: redriven() >= 10, "both being at work", timeout=60)
            first.signal(signal.SIGKILL)
            first.wait()
            wait_until(lambda: redriven() >= 20, "the other one going on", timeout=60)
            second.signal(signal.SIGKILL)
            second.wait()
    before = redriven()
    with Running("dead-letters", "resume", str(operation.operation_id), *SLOWLY, env=env) as third:
        wait_until(lambda: redriven() > before, "a third one going on", timeout=60)
        third.signal(signal.SIGKILL)
        third.wait()
    wait_until(lambda: not at_work(engine), "the server ending what the killed ones had begun", timeout=60)
    left = LETTERS - redriven()
    assert left > 0, "all three were killed at work"
    ended = json.loads(txbox("dead-letters", "resume", str(operation.operation_id), "--json").out)
    assert (len(ended["redriven"]), ended["gone"], ended["failed"], ended["pending"]) == (left, [], {}, 0)
    sent = drained(sqs, queue)
    assert set(sent) == set(ids), "every letter was sent"
    assert sum(sent.values()) - LETTERS <= KILLS, "only what was in the hands of a killed process was sent again"
    assert redriven() == LETTERS
    assert LetterOperations(engine).get(operation.operation_id).outcomes == {"redriven": LETTERS}
