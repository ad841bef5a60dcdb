"""A queue that answers after a while: SQS's protocol over HTTP, with messages made before, in a process of its own.

It keeps nothing and hands out each message once: what is measured is the worker, and not a queue.
"""

import asyncio
import hashlib
import json
import multiprocessing
import random
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.shared.database import ACCOUNTS

RECEIVED_AT_ONCE = 10
IDLE_SECONDS = 1.0


@contextmanager
def slow_queue(seconds: float, messages: int) -> Iterator[str]:
    """Run the server, each of whose answers takes so long; yields the queue's URL."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, seconds, messages), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}/queue/orders"
    finally:
        process.terminate()
        process.join()


def _serve(parent: Connection, seconds: float, messages: int) -> None:
    answers = _receive_answers(messages)

    async def answer(target: str, request: dict[str, Any]) -> bytes:
        await asyncio.sleep(seconds)
        match target.rpartition(".")[2]:
            case "receivemessage":
                ready = next(answers, None)
                if ready is None:
                    await asyncio.sleep(IDLE_SECONDS)
                return ready or b"{}"
            case "deletemessagebatch" | "changemessagevisibilitybatch":
                done = [{"Id": entry["Id"]} for entry in request["Entries"]]
                return json.dumps({"Successful": done, "Failed": []}).encode()
            case _:
                return b'{"Attributes": {}}'

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
                headers = dict(line.split(": ", 1) for line in head[1:] if line)
                body = await reader.readexactly(int(headers["content-length"]))
                content = await answer(headers["x-amz-target"].strip(), json.loads(body))
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: application/x-amz-json-1.0\r\nContent-Length: %d\r\n\r\n%b"
                    % (len(content), content)
                )
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        parent.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(serve())


def _receive_answers(messages: int) -> Iterator[bytes]:
    """Return the answers to ReceiveMessage, as SQS writes them."""
    made = []
    for _ in range(0, messages, RECEIVED_AT_ONCE):
        several = []
        for _ in range(RECEIVED_AT_ONCE):
            body = json.dumps({"account": random.randint(1, ACCOUNTS), "amount": 3, "currency": "EUR"})
            several.append(
                {
                    "MessageId": str(uuid.uuid4()),
                    "ReceiptHandle": str(uuid.uuid4()) * 4,
                    "MD5OfBody": hashlib.md5(body.encode(), usedforsecurity=False).hexdigest(),
                    "Body": body,
                    "Attributes": {
                        "SenderId": "AIDAIENQZJOLO23YVJ4VO",
                        "SentTimestamp": "1763900000000",
                        "ApproximateReceiveCount": "1",
                        "ApproximateFirstReceiveTimestamp": "1763900000000",
                    },
                }
            )
        made.append(json.dumps({"Messages": several}).encode())
    return iter(made)
