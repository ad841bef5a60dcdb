"""A broker on bad days: an HTTP proxy in front of the local SQS, with a log of what SQS really took.

Beside it, at ``/receiver``, an idempotent receiver of effects that no transaction covers: it takes an effect with its
lease's fence, and refuses one whose fence is lower than the highest it has seen for that message.
"""

import http.client
import json
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

REFUSED = "broker refuses this"
"""A body that holds this is refused for good, as SQS refuses characters that XML does not have."""

HANG_SECONDS = 6.0
"""Longer than a relay of the soak waits for an answer."""

CALL_FAULTS = (
    "500 before",
    "503 before",
    "cut before",
    "500 after",
    "cut after",
    "slow",
)
"""What becomes of a call: whether SQS has done it when its answer is lost, the caller cannot know."""

BATCHES = {
    "SendMessageBatch": ("entry failed", "entry failed after", "entry taken twice"),
    "DeleteMessageBatch": ("entry failed", "entry failed after", "entry forgotten"),
    "ChangeMessageVisibilityBatch": ("entry failed", "entry failed after"),
}
"""What becomes of single entries: refused by SQS's own fault, done and called failed, done twice, or only confirmed."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A message that SQS took, in the order in which it did."""

    queue: str
    message_id: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Effect:
    """A call of the receiver."""

    message_id: str
    fence: int
    unknown_attempts: int
    owner: str
    accepted: bool


class Broker:
    """The proxy, in threads of this process.

    Attributes:
        url: for ``AWS_ENDPOINT_URL_SQS``.
        sent: what SQS took, in order.
        effects: the receiver's log, in order.
        faults: how many there were, by kind.
        refused: set when a message to be sent is refused: what its relay does next, a crash must not undo by half.
    """

    def __init__(self, upstream_port: int, seed: int, *, call_faults: float = 0.05, entry_faults: float = 0.02) -> None:
        self._upstream_port = upstream_port
        self._random = random.Random(seed)
        self._call_faults, self._entry_faults = call_faults, entry_faults
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self.sent: list[Sent] = []
        self.effects: list[Effect] = []
        self._highest: dict[str, int] = {}
        self.faults: Counter[str] = Counter()
        self.refused = threading.Event()
        broker = self

        class Handler(_Handler):
            pass

        Handler.broker = broker
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def calm(self) -> None:
        """Have no more faults."""
        self._call_faults = self._entry_faults = 0.0

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, name="soak-broker", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    # --- choices -----------------------------------------------------------------------------------------------------

    def call_fault(self) -> str | None:
        """Choose what becomes of a call."""
        with self._lock:
            if self._random.random() >= self._call_faults:
                return None
            fault = "hang" if self._random.random() < 0.03 else self._random.choice(CALL_FAULTS)
            self.faults[fault] += 1
            return fault

    def entry_fault(self, operation: str, queue: str) -> str | None:
        """Choose what becomes of one entry of a batch."""
        with self._lock:
            if self._random.random() >= self._entry_faults:
                return None
            fault = self._random.choice(BATCHES[operation])
            self.faults[fault] += 1
            return fault

    # --- calls -------------------------------------------------------------------------------------------------------

    def batch(self, operation: str, request: dict[str, Any], forward: Any) -> tuple[int, bytes]:
        """Make a batch call of those entries that have no fault, and answer for all of them."""
        kept, failed, forgotten, extra = [], [], [], []
        for entry in request["Entries"]:
            if REFUSED in entry.get("MessageBody", ""):
                failed.append(_failed(entry, "InvalidMessageContents", sender=True))
                continue
            fault = self.entry_fault(operation, request["QueueUrl"])
            if fault == "entry failed":
                failed.append(_failed(entry, "InternalError", sender=False))
                continue
            if fault == "entry forgotten":
                forgotten.append({"Id": entry["Id"]})
                continue
            if fault == "entry failed after":
                failed.append(_failed(entry, "InternalError", sender=False))
            elif fault == "entry taken twice":
                extra.append({**entry, "Id": f"{entry['Id']}-again"})
            kept.append(entry)
        answer: dict[str, Any] = {"Successful": [], "Failed": []}
        if kept:
            with self._sending:  # so that the log has the order in which SQS took them
                status, body = forward({**request, "Entries": kept})
                if status != 200:
                    return status, body
                answer = json.loads(body)
                if extra:
                    forward({**request, "Entries": extra})
                if operation == "SendMessageBatch":
                    self._note(request["QueueUrl"], kept, answer)
        if failed and operation == "SendMessageBatch":
            self.refused.set()
        called_failed = {entry["Id"] for entry in failed}
        done = [each for each in answer.get("Successful", ()) if each["Id"] not in called_failed]
        answer = {"Successful": done + forgotten, "Failed": [*answer.get("Failed", ()), *failed]}
        return 200, json.dumps(answer).encode()

    def _note(self, queue: str, entries: list[dict[str, Any]], answer: dict[str, Any]) -> None:
        taken = {each["Id"] for each in answer.get("Successful", ())}
        for entry in entries:
            if entry["Id"] in taken:
                message_id = entry["MessageAttributes"]["message-id"]["StringValue"]
                self.sent.append(Sent(queue.rsplit("/", 1)[1], message_id, json.loads(entry["MessageBody"])))

    def receive(self, effect: dict[str, Any]) -> bool:
        """Take an effect, unless a later owner has been here."""
        with self._lock:
            message_id, fence = effect["message_id"], effect["fence"]
            accepted = fence >= self._highest.get(message_id, 0)
            self._highest[message_id] = max(fence, self._highest.get(message_id, 0))
            self.effects.append(Effect(**effect, accepted=accepted))
            return accepted

    @property
    def upstream_port(self) -> int:
        """The port of the SQS behind it."""
        return self._upstream_port


class _Handler(BaseHTTPRequestHandler):
    """One connection of a client, with one to SQS."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 65536
    broker: Broker
    upstream: http.client.HTTPConnection | None = None

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        if len(body := self.rfile.read(length)) < length:
            self.close_connection = True  # the client was killed in the middle of its request
            return
        fault = self.broker.call_fault()
        if fault in ("500 before", "503 before"):
            self._answer(int(fault[:3]), b'{"__type": "com.amazonaws.sqs#ServiceUnavailable", "message": "soak"}')
        elif fault == "cut before":
            self.close_connection = True
        else:
            status, answer = self._done(body)
            if fault in ("slow", "hang"):
                time.sleep(HANG_SECONDS if fault == "hang" else 0.5)  # not a wait: this is the fault
            if fault == "500 after":
                self._answer(500, b'{"__type": "com.amazonaws.sqs#InternalError", "message": "soak"}')
            elif fault == "cut after":
                self.close_connection = True
            else:
                self._answer(status, answer)

    def _done(self, body: bytes) -> tuple[int, bytes]:
        if self.path == "/receiver":
            return 200, json.dumps(self.broker.receive(json.loads(body))).encode()
        operation = self.headers.get("X-Amz-Target", "").rsplit(".", 1)[-1]
        if operation in BATCHES:
            return self.broker.batch(operation, json.loads(body), lambda request: self._forward(json.dumps(request)))
        return self._forward(body)

    def _forward(self, body: str | bytes) -> tuple[int, bytes]:
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _OWN_HEADERS}
        if self.upstream is None:
            self.upstream = http.client.HTTPConnection("127.0.0.1", self.broker.upstream_port)
        self.upstream.request("POST", self.path, body, headers)
        answer = self.upstream.getresponse()
        return answer.status, answer.read()

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/x-amz-json-1.0")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:
            pass  # the client was killed, or has given up
        finally:
            if self.upstream is not None:
                self.upstream.close()

    def log_message(self, *_: object) -> None:
        """Keep quiet."""


_OWN_HEADERS = ("content-length", "connection", "expect", "transfer-encoding")


def _failed(entry: dict[str, Any], code: str, *, sender: bool) -> dict[str, Any]:
    return {"Id": entry["Id"], "Code": code, "Message": "soak", "SenderFault": sender}
