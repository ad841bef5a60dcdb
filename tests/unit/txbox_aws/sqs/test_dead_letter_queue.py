"""The calls by which SQS moves a dead-letter queue back, in the form that SQS's own model gives them."""

from typing import Any

import pytest

from support.aws.queues import QUEUE
from support.aws.scripted_sqs import ScriptedSqs, error
from txbox import BrokerError
from txbox_aws.sqs import DeadLetterQueue, MessageMove

ARN = "arn:aws:sqs:eu-central-1:123456789012:"


def scripted(broker: ScriptedSqs, **answers: Any) -> None:
    def answer(action: str, request: dict[str, Any]) -> Any:
        if action == "GetQueueAttributes":
            return {"Attributes": {"QueueArn": ARN + request["QueueUrl"].rpartition("/")[2]}}
        return answers[action]

    broker.answer = answer


def test_a_move_names_queues_by_their_arns(broker: ScriptedSqs, client: Any) -> None:
    scripted(broker, StartMessageMoveTask={"TaskHandle": "h"})
    dead = DeadLetterQueue(QUEUE, client=client)
    assert dead.start_move() == "h"
    assert dead.start_move(to=f"{QUEUE}-2", per_second=7) == "h"
    assert broker.requests("StartMessageMoveTask") == [
        {"SourceArn": f"{ARN}purchases"},
        {"SourceArn": f"{ARN}purchases", "DestinationArn": f"{ARN}purchases-2", "MaxNumberOfMessagesPerSecond": 7},
    ]


@pytest.mark.parametrize(
    ("results", "move"),
    [
        ([], None),
        (
            [{"TaskHandle": "h", "Status": "RUNNING", "ApproximateNumberOfMessagesMoved": 3}],
            MessageMove("h", "RUNNING", 3),
        ),
        (
            [
                {
                    "Status": "FAILED",
                    "ApproximateNumberOfMessagesMoved": 3,
                    "ApproximateNumberOfMessagesToMove": 9,
                    "FailureReason": "AccessDenied",
                }
            ],
            MessageMove(None, "FAILED", 3, 9, "AccessDenied"),
        ),
    ],
)
def test_how_far_a_move_is(broker: ScriptedSqs, client: Any, results: list[Any], move: MessageMove | None) -> None:
    scripted(broker, ListMessageMoveTasks={"Results": results})
    found = DeadLetterQueue(QUEUE, client=client).latest_move()
    assert found == move
    assert found is None or found.ended is (found.status == "FAILED")
    assert broker.requests("ListMessageMoveTasks") == [{"SourceArn": f"{ARN}purchases", "MaxResults": 1}]


def test_a_move_is_cancelled_by_its_handle(broker: ScriptedSqs, client: Any) -> None:
    scripted(broker, CancelMessageMoveTask={"ApproximateNumberOfMessagesMoved": 1})
    DeadLetterQueue(QUEUE, client=client).cancel_move("h")
    assert broker.requests("CancelMessageMoveTask") == [{"TaskHandle": "h"}]


@pytest.mark.parametrize(
    ("code", "remedy"), [("AccessDenied", "grant sqs:StartMessageMoveTask"), ("UnsupportedOperation", "dead-letter")]
)
def test_what_sqs_refuses_has_a_remedy(broker: ScriptedSqs, client: Any, code: str, remedy: str) -> None:
    scripted(broker, StartMessageMoveTask=error(code))
    with pytest.raises(BrokerError, match=remedy):
        DeadLetterQueue(QUEUE, client=client).start_move()
