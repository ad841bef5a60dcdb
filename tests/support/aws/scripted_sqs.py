"""An SQS that answers by a script, over real HTTP: for what a real one does too rarely to wait for."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

Answer = dict[str, Any] | tuple[int, dict[str, Any]]
"""What to say: a body, or a status and the body of an error."""


class Call(NamedTuple):
    """One call that arrived."""

    action: str
    request: dict[str, Any]
    user_agent: str


def succeed(action: str, request: dict[str, Any]) -> Answer:
    """Answer that all is well; every entry of a batch is confirmed."""
    return {"Successful": [{"Id": entry["Id"]} for entry in request["Entries"]]} if "Entries" in request else {}


def error(code: str, status: int = 400) -> tuple[int, dict[str, Any]]:
    """The answer to a call that is refused as a whole."""
    return status, {"__type": f"com.amazonaws.sqs#{code}", "message": "no"}


def refusing(code: str, *refused: str, sender_fault: bool, times: int = 100) -> Any:
    """A script that refuses the entries with these receipts, the first so many times, and confirms the others."""
    seen = dict.fromkeys(refused, 0)

    def answer(action: str, request: dict[str, Any]) -> Answer:
        successful, failed = [], []
        for entry in request["Entries"]:
            receipt = entry["ReceiptHandle"]
            if receipt in seen and seen[receipt] < times:
                seen[receipt] += 1
                failed.append({"Id": entry["Id"], "Code": code, "Message": "sorry", "SenderFault": sender_fault})
            else:
                successful.append({"Id": entry["Id"]})
        return {"Successful": successful, "Failed": failed}

    return answer


class ScriptedSqs:
    """A server on 127.0.0.1. ``answer`` decides on each call; ``calls`` keeps them."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.answer: Callable[[str, dict[str, Any]], Answer] = succeed
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                action = self.headers["X-Amz-Target"].removeprefix("AmazonSQS.")
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                owner.calls.append(Call(action, request, self.headers["User-Agent"]))
                answer = owner.answer(action, request)
                status, body = answer if isinstance(answer, tuple) else (200, answer)
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/x-amz-json-1.0")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                """Keep quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def requests(self, action: str) -> list[dict[str, Any]]:
        """The requests of one action, in order."""
        return [call.request for call in self.calls if call.action == action]

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def receipts(request: dict[str, Any]) -> list[str]:
    """The receipts in a request, in order."""
    return [entry["ReceiptHandle"] for entry in request["Entries"]]


def timeouts(broker: ScriptedSqs) -> list[int]:
    """How long deliveries were asked to stay invisible, in order."""
    return [
        entry["VisibilityTimeout"]
        for request in broker.requests("ChangeMessageVisibilityBatch")
        for entry in request["Entries"]
    ]
