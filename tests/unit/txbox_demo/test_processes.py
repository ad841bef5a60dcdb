"""What the processes do: they lose answers and acks. That they die at their moments is seen in whole runs."""

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import boto3
import pytest

from support.aws.queues import QUEUE
from support.aws.scripted_sqs import ScriptedSqs, receipts, refusing
from txbox.relay import OutboxMessage, Refused
from txbox_demo import processes
from txbox_demo.processes import N_SENT, DemoTask, LossyPublisher, lose_acks

MakeTask = Callable[..., DemoTask]


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Have answers and acks lost from now on, all or none: lost(whether)."""
    return lambda whether: monkeypatch.setattr(processes, "_happens", lambda _: whether)


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
