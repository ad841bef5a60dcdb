"""A decorated function, once for each message, under leases in DynamoDB: txbox's, and the idempotency of Powertools.

The store answers at once, and always that the condition was met: what is measured is the client.
"""

import asyncio
import json
import multiprocessing
import os
import warnings
from collections.abc import Callable
from email.utils import formatdate
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.peers.feed import Feed, wait_for_the_end

SETTINGS = {"AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none", "AWS_DEFAULT_REGION": "us-east-1"}
TAKEN = ("expires_at", "asked_at", "remove_at", "owner", "mark")


def serve(parent: Connection) -> None:
    """Answer PutItem and UpdateItem as DynamoDB does for an item that was not there."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
            headers = dict(line.split(": ", 1) for line in head[1:] if line)
            request = json.loads(await reader.readexactly(int(headers["content-length"])))
            answer = {}
            if request.get("ReturnValues") == "ALL_NEW":
                values = request["ExpressionAttributeValues"]
                counts = {"fence": {"N": "1790000000001"}, "attempts": {"N": "1"}, "failures": {"N": "0"}}
                answer = {"Attributes": {**request["Key"], **{name: values[f":{name}"] for name in TAKEN}, **counts}}
            body = json.dumps(answer).encode()
            writer.write(
                b"HTTP/1.1 200 OK\r\nDate: %b\r\nContent-Length: %d\r\n\r\n%b"
                % (formatdate(usegmt=True).encode(), len(body), body)
            )

    async def serve_forever() -> None:
        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        parent.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(serve_forever())


def by_txbox() -> Callable[[str], Any]:
    """Return the function under txbox's decorator."""
    from txbox import idempotent
    from txbox_aws.dynamodb import DynamoDBLedger

    return idempotent(lambda _: None, ledger=DynamoDBLedger("benchmark"), identify=lambda message_id: message_id)


def by_powertools() -> Callable[[str], Any]:
    """Return the function under that of Powertools."""
    from aws_lambda_powertools.utilities.idempotency import (
        DynamoDBPersistenceLayer,
        IdempotencyConfig,
        idempotent_function,
    )

    warnings.simplefilter("ignore")  # it misses the context of Lambda
    layer, config = DynamoDBPersistenceLayer(table_name="idempotency"), IdempotencyConfig()

    @idempotent_function(data_keyword_argument="message_id", persistence_store=layer, config=config)
    def work(message_id: str) -> None:
        """Do nothing."""

    return lambda message_id: work(message_id=message_id)


def main() -> None:
    """Call the function for each message, one after the other."""
    feed = Feed()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True).start()
    os.environ.update(SETTINGS, AWS_ENDPOINT_URL_DYNAMODB=f"http://127.0.0.1:{ours.recv()}")
    is_txbox = feed.variant == "txbox"
    call = by_txbox() if is_txbox else by_powertools()
    call("first")
    feed.begin(
        "txbox" if is_txbox else "aws-lambda-powertools", "one thread, two requests a message, DynamoDB's protocol"
    )
    for message_id, _ in feed.deliveries:
        call(message_id)
    feed.end()
    wait_for_the_end()


if __name__ == "__main__":
    main()
