"""What the processes do: they lose answers and acks, and die at a moment of the supervisor's choice."""

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import boto3
import pytest

from support.aws.queues import QUEUE
from support.aws.scripted_sqs import ScriptedSqs, receipts, refusing
from support.waiting import wait_until
from txbox.relay import OutboxMessage, Refused
from txbox_demo import processes
from txbox_demo.processes import ANYWHERE, CLAIMED, N_SENT, ROLES, SENT, DemoTask, LossyPublisher, lose_acks

MakeTask = Callable[..., DemoTask]

MOMENTS = {moment for _, moments in ROLES.values() for moment in moments}


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


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Have answers and acks lost from now on, all or none: lost(whether)."""
    return lambda whether: monkeypatch.setattr(processes, "_happens", lambda _: whether)


@pytest.mark.parametrize("moment", sorted(MOMENTS - {ANYWHERE}))
def test_a_process_dies_at_its_moment_and_at_no_other(moment: str, make_task: MakeTask, kills: list[int]) -> None:
    task = make_task(moment=moment, life=20)
    for other in MOMENTS - {moment}:
        task.may_die(other, 100)
    task.may_die(moment, 19)
    assert kills == []
    with pytest.raises(Died):
        task.may_die(moment)
    assert kills == [os.getpid()]


def test_anywhere_is_in_another_thread(make_task: MakeTask, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    make_task(moment=ANYWHERE, life=20).may_die(SENT, 20)
    wait_until(lambda: killed == [os.getpid()])


def test_acks_that_are_lost_are_confirmed_unless_sqs_refuses_them_and_not_carried_out(
    lost: Callable[[bool], None],
) -> None:
    entries = [{"Id": str(number), "ReceiptHandle": f"r-{number}"} for number in range(10)]
    own = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "eu-central-1"}
    with closing(ScriptedSqs()) as broker, closing(boto3.client("sqs", endpoint_url=broker.url, **own)) as client:
        lose_acks(client)
        answers: list[Any] = []
        for whether in (True, False):
            lost(whether)
            answers.append(client.delete_message_batch(QueueUrl=QUEUE, Entries=entries))
        assert [receipts(request) for request in broker.requests("DeleteMessageBatch")] == [
            ["r-0"],  # SQS refuses a batch of none
            [f"r-{number}" for number in range(10)],
        ]
        for answer in answers:  # each once: the first call's losses are past
            assert sorted(entry["Id"] for entry in answer["Successful"]) == [str(number) for number in range(10)]
        lost(True)
        broker.answer = refusing("InternalError", "r-0", sender_fault=False)
        answer = client.delete_message_batch(QueueUrl=QUEUE, Entries=entries)
        assert [entry["Id"] for entry in answer["Failed"]] == ["0"]
        assert len(answer["Successful"]) == 9


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
