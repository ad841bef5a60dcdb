import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest
from werkzeug.serving import make_server

from txbox_local import LocalAws
from txbox_local.aws.moto_server import KeepAliveHandler

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient


def test_send_receive_delete(sqs: "SQSClient", aws: LocalAws) -> None:
    queue = sqs.create_queue(QueueName="plain")["QueueUrl"]
    assert queue.startswith(f"{aws.endpoint_url}/")
    sent = sqs.send_message_batch(
        QueueUrl=queue,
        Entries=[
            {
                "Id": str(n),
                "MessageBody": f"body {n} é",
                "MessageAttributes": {"message-id": {"DataType": "String", "StringValue": f"m-{n}"}},
            }
            for n in range(10)
        ],
    )
    assert len(sent["Successful"]) == 10
    received = sqs.receive_message(
        QueueUrl=queue,
        MaxNumberOfMessages=10,
        MessageAttributeNames=["All"],
        MessageSystemAttributeNames=["ApproximateReceiveCount"],
    )["Messages"]
    assert [message["Body"] for message in received] == [f"body {n} é" for n in range(10)]
    assert received[3]["MessageAttributes"]["message-id"]["StringValue"] == "m-3"
    assert received[3]["Attributes"]["ApproximateReceiveCount"] == "1"
    deleted = sqs.delete_message_batch(
        QueueUrl=queue,
        Entries=[{"Id": one["MessageId"], "ReceiptHandle": one["ReceiptHandle"]} for one in received],
    )
    assert len(deleted["Successful"]) == 10
    attributes = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["All"])["Attributes"]
    assert attributes["ApproximateNumberOfMessages"] == "0"
    assert attributes["ApproximateNumberOfMessagesNotVisible"] == "0"


def test_connections_are_kept_alive(aws: LocalAws) -> None:
    connection = HTTPConnection(aws.endpoint_url.removeprefix("http://"))
    connection.connect()
    first = connection.sock
    for _ in range(3):
        connection.request("GET", "/moto-api/data.json")
        assert connection.getresponse().read()
    assert connection.sock is first
    connection.close()


def test_a_long_poll_lets_others_through_and_ends_with_a_message(sqs: "SQSClient") -> None:
    queue = sqs.create_queue(QueueName="polled")["QueueUrl"]
    with ThreadPoolExecutor(2) as pool:
        polls = [pool.submit(sqs.receive_message, QueueUrl=queue, WaitTimeSeconds=20) for _ in range(2)]
        started = time.monotonic()
        for body in ("one", "two"):
            sqs.send_message(QueueUrl=queue, MessageBody=body)
        bodies = {poll.result()["Messages"][0]["Body"] for poll in polls}
        assert time.monotonic() - started < 15
    assert bodies == {"one", "two"}


def test_fifo_groups_keep_their_order_between_receivers(sqs: "SQSClient") -> None:
    groups, each = 5, 12
    queue = sqs.create_queue(QueueName="ordered.fifo", Attributes={"FifoQueue": "true"})["QueueUrl"]
    got: list[tuple[str, int]] = []

    def consume() -> None:
        while messages := sqs.receive_message(QueueUrl=queue, MaxNumberOfMessages=2, WaitTimeSeconds=1).get("Messages"):
            for message in messages:
                group, number = message["Body"].split()
                got.append((group, int(number)))
                sqs.delete_message(QueueUrl=queue, ReceiptHandle=message["ReceiptHandle"])

    with ThreadPoolExecutor(4) as pool:
        consumers = [pool.submit(consume) for _ in range(4)]
        for number in range(each):
            for group in range(groups):
                body = f"g{group} {number}"
                sqs.send_message(
                    QueueUrl=queue,
                    MessageBody=body,
                    MessageGroupId=f"g{group}",
                    MessageDeduplicationId=body.replace(" ", "-"),
                )
        for consumer in consumers:
            consumer.result()
    for group in range(groups):
        assert [number for name, number in got if name == f"g{group}"] == list(range(each))


def test_a_request_that_fails_leaves_the_connection_usable(caplog: pytest.LogCaptureFixture) -> None:
    def application(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        if environ["PATH_INFO"] == "/broken":
            raise ValueError("broken on purpose")
        start_response("200 OK", [])
        return [b"fine"]

    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=KeepAliveHandler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    connection = HTTPConnection("127.0.0.1", server.port)
    try:
        connection.request("POST", "/broken", body=b"not read by the application")
        response = connection.getresponse()
        assert (response.status, response.read()) == (500, b"")
        connection.request("POST", "/", body=iter([b"sent in ", b"chunks"]), encode_chunked=True)
        assert connection.getresponse().read() == b"fine"
    finally:
        connection.close()
        server.shutdown()
        thread.join()
    assert "broken on purpose" in caplog.text


def test_the_log_is_where_it_was_asked_for(tmp_path: Path) -> None:
    with LocalAws(log=tmp_path / "aws.log"):
        assert (tmp_path / "aws.log").exists()
