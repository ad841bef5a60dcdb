"""What the processes do: they place orders, lose answers and acks, and die at a moment of the supervisor's choice."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from typing import Any

import boto3
import pytest
from sqlalchemy import Engine

from support.aws.queues import QUEUE
from support.aws.scripted_sqs import ScriptedSqs, receipts, refusing
from support.waiting import wait_until
from txbox import Outgoing
from txbox.relay import OutboxMessage, Refused
from txbox_demo import processes
from txbox_demo.processes import (
    ANYWHERE,
    CLAIMED,
    INSERTED,
    N_SENT,
    ROLES,
    SENT,
    DemoTask,
    LossyPublisher,
    MortalOutbox,
    lose_acks,
)

MakeTask = Callable[..., DemoTask]


class Died(BaseException):
    """Stands in for SIGKILL."""


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The processes that were killed: by an exception in the thread that does it."""
    killed: list[int] = []

    def kill(pid: int, number: int) -> None:
        assert number == signal.SIGKILL
        killed.append(pid)
        raise Died

    monkeypatch.setattr(os, "kill", kill)
    return killed


@pytest.mark.parametrize("moment", sorted({moment for _, moments in ROLES.values() for moment in moments} - {ANYWHERE}))
def test_a_process_dies_at_its_moment_and_at_no_other(moment: str, make_task: MakeTask, kills: list[int]) -> None:
    task = make_task(moment=moment, life=20)
    for other in {moment for _, moments in ROLES.values() for moment in moments} - {moment}:
        task.may_die(other, 100)
    task.may_die(moment, 10)
    task.may_die(moment, 9)
    assert kills == []
    with pytest.raises(Died):
        task.may_die(moment)
    assert kills == [os.getpid()]


def test_billing_dies_when_it_has_published_and_not_committed(
    make_task: MakeTask, tables: Engine, kills: list[int]
) -> None:
    outbox = MortalOutbox(make_task(moment=INSERTED, life=3))
    for _ in range(2):
        with suppress(Died), tables.begin() as connection:
            outbox.publish_many(connection, [Outgoing("own:mails", "x")] * 2)
    assert len(kills) == 1
    with tables.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM outbox_message").scalar_one() == 2


def test_anywhere_is_in_another_thread(make_task: MakeTask, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    task = make_task(moment=ANYWHERE, life=20)
    task.may_die(INSERTED, 10)
    assert killed == []
    task.may_die(SENT, 10)
    wait_until(lambda: killed == [os.getpid()])


# --- acks ------------------------------------------------------------------------------------------------------------


RECEIPTS = [f"r-{number}" for number in range(10)]


@pytest.fixture
def broker() -> Iterator[ScriptedSqs]:
    with closing(ScriptedSqs()) as broker:
        yield broker


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Have answers and acks lost from now on, all or none: lost(whether)."""
    return lambda whether: monkeypatch.setattr(processes, "_happens", lambda _: whether)


@pytest.fixture
def client(broker: ScriptedSqs, lost: Callable[[bool], None]) -> Iterator[Any]:
    client = boto3.client(
        "sqs",
        region_name="eu-central-1",
        endpoint_url=broker.url,
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )
    lose_acks(client)
    lost(True)
    with closing(client):
        yield client


def delete(client: Any) -> dict[str, Any]:
    entries = [{"Id": str(number), "ReceiptHandle": receipt} for number, receipt in enumerate(RECEIPTS)]
    answer: dict[str, Any] = client.delete_message_batch(QueueUrl=QUEUE, Entries=entries)
    return answer


def confirmed(answer: dict[str, Any]) -> list[str]:
    return sorted(entry["Id"] for entry in answer["Successful"])


def test_lost_acks_are_confirmed_and_not_carried_out(broker: ScriptedSqs, client: Any) -> None:
    answer = delete(client)
    (request,) = broker.requests("DeleteMessageBatch")
    assert receipts(request) == RECEIPTS[:1]  # SQS refuses a batch of none
    assert confirmed(answer) == [str(number) for number in range(10)]


def test_acks_that_are_not_lost_go_through(broker: ScriptedSqs, client: Any, lost: Callable[[bool], None]) -> None:
    delete(client)
    lost(False)
    answer = delete(client)
    assert receipts(broker.requests("DeleteMessageBatch")[1]) == RECEIPTS
    assert confirmed(answer) == [str(number) for number in range(10)]  # each once: the first call's losses are past


def test_an_ack_that_sqs_refuses_stays_refused(broker: ScriptedSqs, client: Any) -> None:
    broker.answer = refusing("InternalError", "r-0", sender_fault=False)
    answer = delete(client)
    assert [entry["Id"] for entry in answer["Failed"]] == ["0"]
    assert confirmed(answer) == [str(number) for number in range(1, 10)]


# --- the relay's answers ---------------------------------------------------------------------------------------------

MESSAGES = [OutboxMessage(f"m-{number}", "own:x", b"") for number in range(5)]


class Broker:
    """A publisher that takes everything but what it is told to refuse."""

    def __init__(self) -> None:
        self.taken: list[str] = []

    def send(self, messages: Sequence[OutboxMessage]) -> Sequence[Refused]:
        self.taken += [message.id for message in messages if message.id != "m-1"]
        return [Refused(message, "no") for message in messages if message.id == "m-1"]


@pytest.mark.parametrize(("whether", "refused"), [(False, ["m-1"]), (True, ["m-0", "m-1", "m-2", "m-3", "m-4"])])
def test_messages_whose_answer_is_lost_have_arrived_and_are_refused_once(
    whether: bool, refused: list[str], make_task: MakeTask, lost: Callable[[bool], None]
) -> None:
    lost(whether)
    broker, task = Broker(), make_task()
    answers = LossyPublisher(broker, task).send(MESSAGES)
    assert sorted(refusal.message.id for refusal in answers) == refused
    assert not any(refusal.final for refusal in answers)
    assert broker.taken == ["m-0", "m-2", "m-3", "m-4"]
    assert task.counts[N_SENT] == 5


@pytest.mark.parametrize(("moment", "taken"), [(CLAIMED, 4), (SENT, 8)])
def test_a_relay_dies_before_the_send_or_after_it(
    moment: str, taken: int, make_task: MakeTask, kills: list[int]
) -> None:
    broker = Broker()
    relay = LossyPublisher(broker, make_task(moment=moment, life=6))
    relay.send(MESSAGES)
    with pytest.raises(Died):
        relay.send(MESSAGES)
    assert len(broker.taken) == taken
