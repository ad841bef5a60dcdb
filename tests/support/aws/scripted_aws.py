"""SQS, SNS and EventBridge that answer senders by a script, over real HTTP: for what real ones do too rarely."""

import hashlib
import json
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs
from xml.sax.saxutils import escape


@dataclass(frozen=True)
class SentEntry:
    """An entry of a call that arrived."""

    message_id: str
    body: str
    parameters: dict[str, Any]


@dataclass(frozen=True)
class Sent:
    """A call that arrived."""

    service: str
    destination: str
    entries: tuple[SentEntry, ...]

    @property
    def ids(self) -> list[str]:
        return [entry.message_id for entry in self.entries]


@dataclass(frozen=True)
class Failed:
    """An entry is refused."""

    code: str
    sender_fault: bool = False


CONFIRMED = "confirmed"
OMITTED = "omitted"
"""The answer does not mention an entry, which was taken all the same."""
UNLIKE = "unlike"
"""An entry is confirmed with other MD5 sums than its own."""


@dataclass(frozen=True)
class Error:
    """The whole call is refused."""

    code: str
    status: int = 400


HANG = "hang"
"""No answer ever comes, although every entry was taken."""
RESET = "reset"
"""The connection is reset, although every entry was taken."""
GARBAGE = "garbage"
"""An answer that cannot be read, although every entry was taken."""

Answer = Sequence[Any] | Error | str
"""What becomes of each entry, or of the call."""


def confirm(sent: Sent) -> Answer:
    """Confirm every entry."""
    return [CONFIRMED] * len(sent.entries)


def each(**results: Any) -> Callable[[Sent], Answer]:
    """A script that has something else than a confirmation for the entries with these message ids."""
    return lambda sent: [results.get(entry.message_id, CONFIRMED) for entry in sent.entries]


@dataclass
class ScriptedAws:
    """A server on 127.0.0.1. ``answer`` decides on each call; ``calls`` keeps them, ``taken`` the entries it took."""

    answer: Callable[[Sent], Answer] = confirm
    calls: list[Sent] = field(default_factory=list)
    taken: list[SentEntry] = field(default_factory=list)
    most_at_once: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._at_once = 0
        self._closing = threading.Event()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                owner._serve(self, _sent(self.headers.get("X-Amz-Target", ""), body))

            def log_message(self, *_: object) -> None:
                """Keep quiet."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, *_: object) -> None:
                """A client that has gone is none of our business."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def reset(self) -> None:
        """Confirm everything again, and forget what was."""
        self.answer, self.calls, self.taken, self.most_at_once = confirm, [], [], 0

    def close(self) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _serve(self, handler: BaseHTTPRequestHandler, sent: Sent) -> None:
        with self._lock:
            self.calls.append(sent)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            answer = self.answer(sent)
        finally:
            with self._lock:
                self._at_once -= 1
        if isinstance(answer, str | Error):
            results: Sequence[Any] = [None if isinstance(answer, Error) else OMITTED] * len(sent.entries)
        else:
            results = answer
        with self._lock:
            self.taken += [
                entry
                for entry, result in zip(sent.entries, results, strict=True)
                if result in (CONFIRMED, OMITTED, UNLIKE)
            ]
        if answer == HANG:
            self._closing.wait(30)
            handler.close_connection = True
        elif answer == RESET:
            handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            handler.connection.close()
            handler.close_connection = True
        elif answer == GARBAGE:
            _write(handler, 200, b"<<<not an answer")
        elif isinstance(answer, Error):
            _write(handler, answer.status, _error(sent, answer))
        else:
            _write(handler, 200, _told(sent, answer))


def _write(handler: BaseHTTPRequestHandler, status: int, content: bytes) -> None:
    handler.send_response(status)
    handler.send_header("Content-Type", "application/x-amz-json-1.1")
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content)


def _sent(target: str, body: bytes) -> Sent:
    if target == "AmazonSQS.SendMessageBatch":
        request = json.loads(body)
        entries = [
            SentEntry(entry["MessageAttributes"]["message-id"]["StringValue"], entry["MessageBody"], entry)
            for entry in request["Entries"]
        ]
        return Sent("sqs", request["QueueUrl"], tuple(entries))
    if target == "AWSEvents.PutEvents":
        request = json.loads(body)
        entries = [
            SentEntry(entry["Resources"][0].removeprefix("message-id:"), entry["Detail"], entry)
            for entry in request["Entries"]
        ]
        return Sent("events", request["Entries"][0]["EventBusName"], tuple(entries))
    form = {name: values[0] for name, values in parse_qs(body.decode(), keep_blank_values=True).items()}
    assert form["Action"] == "PublishBatch", (target, form)
    entries = []
    while (beginning := f"PublishBatchRequestEntries.member.{len(entries) + 1}.") + "Id" in form:
        entry: dict[str, Any] = {
            name.removeprefix(beginning): value for name, value in form.items() if name.startswith(beginning)
        }
        attributes = {
            value: entry[name.removesuffix("Name") + "Value.StringValue"]
            for name, value in entry.items()
            if name.startswith("MessageAttributes.entry.") and name.endswith(".Name")
        }
        entries.append(SentEntry(attributes["message-id"], entry["Message"], entry | {"attributes": attributes}))
    return Sent("sns", form["TopicArn"], tuple(entries))


def _told(sent: Sent, results: Sequence[Any]) -> bytes:
    successful: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    in_order: list[dict[str, Any]] = []
    for entry, result in zip(sent.entries, results, strict=True):
        number = entry.parameters.get("Id", "")
        if isinstance(result, Failed):
            failed.append({"Id": number, "Code": result.code, "Message": "no", "SenderFault": result.sender_fault})
            in_order.append({"ErrorCode": result.code, "ErrorMessage": "no"})
        elif result == OMITTED:
            in_order.append({})
        else:
            content = entry.body if result == CONFIRMED else "something else"
            md5 = hashlib.md5(content.encode()).hexdigest()
            successful.append({"Id": number, "MessageId": f"broker-{entry.message_id}", "MD5OfMessageBody": md5})
            in_order.append({"EventId": f"event-{entry.message_id}"})
    match sent.service:
        case "sqs":
            return json.dumps({"Successful": successful, "Failed": failed}).encode()
        case "events":
            failures = sum("ErrorCode" in one for one in in_order)
            return json.dumps({"FailedEntryCount": failures, "Entries": in_order}).encode()
    return (
        '<PublishBatchResponse xmlns="http://sns.amazonaws.com/doc/2010-03-31/"><PublishBatchResult>'
        f"<Successful>{_members(successful)}</Successful><Failed>{_members(failed)}</Failed>"
        "</PublishBatchResult></PublishBatchResponse>"
    ).encode()


def _members(entries: Sequence[dict[str, Any]]) -> str:
    return "".join(
        "<member>" + "".join(f"<{name}>{_text(value)}</{name}>" for name, value in entry.items()) + "</member>"
        for entry in entries
    )


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else escape(str(value))


def _error(sent: Sent, error: Error) -> bytes:
    if sent.service == "sns":
        return (
            '<ErrorResponse xmlns="http://sns.amazonaws.com/doc/2010-03-31/"><Error><Type>Sender</Type>'
            f"<Code>{error.code}</Code><Message>no</Message></Error></ErrorResponse>"
        ).encode()
    return json.dumps({"__type": f"com.amazonaws#{error.code}", "message": "no"}).encode()
