"""One execution for each message, in a Step Functions over HTTP.

moto keeps an execution running until it is stopped, and compares inputs as texts; whether AWS compares them as texts
or as values is not documented, and makes no difference here.
"""

import json
import pickle
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from support.aws.queues import wait_until_empty
from support.waiting import wait_until
from support.workers.memory_worker import at_work
from txbox import BrokerError, DeadLetters, Inbox, InvalidConfiguration, Message, Mismatch, Outcome
from txbox.backoff import Backoff
from txbox_aws.sqs import SqsWorker
from txbox_aws.step_functions import Executions
from txbox_local import LocalAws

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient
    from types_boto3_stepfunctions import SFNClient

MESSAGE = Message("m-1", b'{"order": 17, "cents": 2500}')


@pytest.fixture
def client(aws: LocalAws) -> Iterator["SFNClient"]:
    client = boto3.client("stepfunctions")
    yield client
    client.close()


@pytest.fixture
def make_machine(client: "SFNClient") -> Callable[..., str]:
    def make(kind: Any = "STANDARD") -> str:
        return client.create_state_machine(
            name=f"orders-{uuid.uuid4().hex[:8]}",
            definition='{"StartAt": "Wait", "States": {"Wait": {"Type": "Wait", "Seconds": 60, "End": true}}}',
            roleArn="arn:aws:iam::123456789012:role/any",
            type=kind,
        )["stateMachineArn"]

    return make


@pytest.fixture
def machine(make_machine: Callable[..., str]) -> str:
    return make_machine()


def executions_of(client: "SFNClient", machine: str) -> list[str]:
    return sorted(each["name"] for each in client.list_executions(stateMachineArn=machine)["executions"])


def test_a_message_starts_an_execution_of_its_name_with_its_body(client: "SFNClient", machine: str) -> None:
    executions = Executions(machine)
    started = executions.start(MESSAGE)
    executions.close()
    assert started.outcome is Outcome.PROCESSED
    described = client.describe_execution(executionArn=started.arn)
    assert (described["name"], described["input"]) == ("m-1", MESSAGE.text)


def test_a_duplicate_of_a_running_execution_is_told_by_its_start(client: "SFNClient", machine: str) -> None:
    executions = Executions(machine, client=client)
    begun = time.monotonic()
    first = executions.start(MESSAGE)
    # A second within which nobody can tell, and one that the clocks of two servers may differ by.
    wait_until(lambda: executions.start(MESSAGE).outcome is Outcome.DUPLICATE, "told as a duplicate", every=0.2)
    assert time.monotonic() - begun > 1.0
    assert executions.start(MESSAGE).arn == first.arn
    assert executions_of(client, machine) == ["m-1"]


def test_a_duplicate_of_an_execution_that_has_ended_is_one(client: "SFNClient", machine: str) -> None:
    executions = Executions(machine, client=client)
    first = executions.start(MESSAGE)
    client.stop_execution(executionArn=first.arn)
    again = executions.start(MESSAGE)
    assert (again.arn, again.outcome) == (first.arn, Outcome.DUPLICATE)
    otherwise_written = Message("m-1", b'{"cents":2500.0,"order":17}')
    assert executions.start(otherwise_written).outcome is Outcome.DUPLICATE
    assert executions_of(client, machine) == ["m-1"]


def test_the_same_input_written_otherwise_is_a_duplicate_while_it_runs(client: "SFNClient", machine: str) -> None:
    executions = Executions(machine, client=client)
    executions.start(MESSAGE, input={"a": 1, "b": 2})
    assert executions.start(Message("m-1", b'{"b": 2, "a": 1}')).outcome is Outcome.DUPLICATE
    assert executions_of(client, machine) == ["m-1"]


@pytest.mark.parametrize("ended", [False, True])
def test_another_input_under_the_same_id_is_a_mismatch(client: "SFNClient", machine: str, ended: bool) -> None:
    executions = Executions(machine, client=client)
    first = executions.start(MESSAGE)
    if ended:
        client.stop_execution(executionArn=first.arn)
    for other in (b'{"order": 17, "cents": 2501}', b"{}", b"true"):
        with pytest.raises(Mismatch) as error:
            executions.start(Message("m-1", other))
        name = machine.rsplit(":", 1)[1]
        assert (error.value.subscriber_id, error.value.message_ids) == (name, ("m-1",))
        assert str(error.value).startswith(f"the execution m-1 of {name} began with another input")
        assert str(error.value).endswith("or give name= where a message starts several executions")
        copied = pickle.loads(pickle.dumps(error.value))
        assert (str(copied), copied.message_ids) == (str(error.value), ("m-1",))
    assert executions_of(client, machine) == ["m-1"]
    assert client.describe_execution(executionArn=first.arn)["input"] == MESSAGE.text


def test_an_input_of_ones_own_is_written_the_same_way_every_time(client: "SFNClient", machine: str) -> None:
    executions = Executions(machine, client=client)
    message = Message("m-1", b"no JSON")
    first = executions.start(message, input={"b": "é", "a": None})
    assert client.describe_execution(executionArn=first.arn)["input"] == '{"a":null,"b":"é"}'
    executions.start(message, input={"a": None, "b": "é"})
    assert executions.start(Message("m-2", b"x"), input=None).outcome is Outcome.PROCESSED
    assert executions_of(client, machine) == ["m-1", "m-2"]


def test_a_message_can_start_several_executions_under_names(client: "SFNClient", machine: str) -> None:
    executions = Executions(machine, client=client)
    arns = {executions.start(MESSAGE, name=f"{MESSAGE.id} {step}").arn for step in ("refund", "letter", "refund")}
    assert len(arns) == len(executions_of(client, machine)) == 2


def test_workflows_that_do_not_know_their_names_are_refused(
    client: "SFNClient", make_machine: Callable[..., str]
) -> None:
    machine = make_machine("EXPRESS")
    executions = Executions(machine, client=client)
    for _ in range(2):
        with pytest.raises(InvalidConfiguration, match="of type EXPRESS"):
            executions.start(MESSAGE)


def test_the_type_is_looked_at_once(client: "SFNClient", machine: str) -> None:
    calls: list[str] = []
    client.meta.events.register("before-call.stepfunctions", lambda model, **_: calls.append(model.name))
    executions = Executions(machine, client=client)
    for number in range(3):
        executions.start(Message(f"m-{number}", b"{}"))
    assert calls == ["DescribeStateMachine", *["StartExecution"] * 3]


def test_trouble_has_a_remedy(machine: str, client: "SFNClient", monkeypatch: pytest.MonkeyPatch) -> None:
    client.delete_state_machine(stateMachineArn=machine)
    with pytest.raises(BrokerError, match=r"Step Functions refused .* create the state machine") as error:
        Executions(machine, client=client).start(MESSAGE)
    assert error.value.permanent
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(BrokerError, match="Step Functions cannot be reached") as error:
        Executions(machine).start(MESSAGE)
    assert not error.value.permanent


def test_sixteen_threads_that_start_the_same_messages_start_each_once(client: "SFNClient", machine: str) -> None:
    messages = [Message(f"m-{number}", json.dumps({"number": number}).encode()) for number in range(5)]
    executions = Executions(machine)

    def start_all(_: int) -> list[str]:
        return [executions.start(message).arn for message in messages]

    with ThreadPoolExecutor(16) as pool:
        arns = list(pool.map(start_all, range(16)))
    executions.close()
    assert all(each == arns[0] for each in arns)
    assert executions_of(client, machine) == [message.id for message in messages]


def test_a_worker_that_fails_after_the_start_starts_no_second_one(
    client: "SFNClient", machine: str, engine: Engine, sqs: "SQSClient", queue: str
) -> None:
    executions = Executions(machine, client=client)
    seen: list[str] = []

    def handle(_session: Session, message: Message) -> None:
        seen.append(message.id)
        executions.start(message)
        if len(seen) == 1:
            raise ConnectionError("between the start and the commit")

    def send(body: str) -> None:
        sqs.send_message(
            QueueUrl=queue,
            MessageBody=body,
            MessageAttributes={"message-id": {"DataType": "String", "StringValue": "m-1"}},
        )

    at_once = Backoff(first_seconds=0.0, longest_seconds=0.0)
    send('{"cents": 5}')
    worker = SqsWorker(
        queue, inbox=Inbox("orders"), engine=engine, handler=handle, wait_seconds=1, backoff=at_once, client=sqs
    )
    with at_work(worker):
        wait_until_empty(sqs, queue)
    assert worker.counts == {Outcome.FAILED: 1, Outcome.PROCESSED: 1}
    assert seen == ["m-1", "m-1"]
    assert executions_of(client, machine) == ["m-1"]

    # A subscriber that knows nothing of the message finds the execution; with another body, it is parked.
    send('{"cents": 6}')
    worker = SqsWorker(
        queue, inbox=Inbox("others"), engine=engine, handler=handle, wait_seconds=1, backoff=at_once, client=sqs
    )
    with at_work(worker):
        wait_until_empty(sqs, queue)
    assert worker.counts == {Outcome.MISMATCH: 1}
    assert [letter.message_id for letter in DeadLetters(engine).list()] == ["m-1"]
    assert executions_of(client, machine) == ["m-1"]
