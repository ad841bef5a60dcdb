"""The web service as a program that kills itself at a moment. Its arguments: a file descriptor, a URL, and the moment.

It listens on a socket that the test has opened, so that a service that is started anew has the same address.
"""

import os
import signal
import socket
import sys
from typing import Any

import uvicorn
from sqlalchemy.orm import Session

from support.web.service import Purchase, service
from txbox import Outbox

IN_HANDLER, COMMITTED, NEVER = "in the handler", "committed", "never"
"""Moments: its statements are done; it has committed, and nothing is sent."""


def publish_receipt(session: Session, purchase: Purchase) -> None:
    """Publish a message to a subscriber in this database."""
    Outbox().publish(session, "inbox:receipts", b"{}", key=purchase.item, message_id=f"receipt of {purchase.item}")


def kill() -> None:
    """End this process as a lost machine does."""
    os.kill(os.getpid(), signal.SIGKILL)


def main(descriptor: str, url: str, moment: str) -> None:
    """Serve, until it is killed."""
    app = service(url, then=lambda _: kill() if moment == IN_HANDLER else None, also=publish_receipt)

    async def killing(scope: Any, receive: Any, send: Any) -> None:
        async def sending(message: Any) -> None:
            if moment == COMMITTED:
                kill()
            await send(message)

        await app(scope, receive, sending if scope["type"] == "http" else send)

    server = uvicorn.Server(uvicorn.Config(killing, log_level="error", ws="none"))
    server.run(sockets=[socket.socket(fileno=int(descriptor))])


if __name__ == "__main__":
    main(*sys.argv[1:])
