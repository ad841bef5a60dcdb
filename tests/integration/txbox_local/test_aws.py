import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest

from txbox_local import LocalAws

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient


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


def test_a_request_that_fails_leaves_the_connection_usable(caplog: pytest.LogCaptureFixture) -> None:
    # Here, as each process of a run would import all of moto.
    from werkzeug.serving import make_server

    from txbox_local.aws.moto_server import KeepAliveHandler

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
