"""One worker process of the demo, with a death foretold.

Started by ``txbox_workers.demo.crew``; its orders come as JSON on the first line of stdin. The rest of stdin is a
lifeline: when it ends, whoever started this process is gone, and so it goes too.
"""

import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy.orm import Session

from txbox import Inbox, Message
from txbox.instrumentation import Committed, Hook, Received
from txbox.testing import kill_at
from txbox_workers.demo.billing import SUBSCRIBER, add_purchase
from txbox_workers.demo.journal import Journal
from txbox_workers.settings import Settings, database_engine, database_url
from txbox_workers.sqs import SqsWorker, sqs_client

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

__all__ = ["Orders"]

LOST_ACK_SHARE = 0.10
"""Of all acks: confirmed by the broker, and forgotten by it."""


@dataclass(frozen=True, slots=True)
class Orders:
    """What a worker process is to do.

    Attributes:
        queue_url: where it works.
        schema: where its tables are.
        journal: the file it writes.
        visibility_seconds: how long its deliveries are its own.
        die: where it kills itself: "received", "handling", "committed", or "" for nowhere.
        die_after: at the how-manieth batch, or message for "handling".
        seed: of its random choices.
    """

    queue_url: str
    schema: str
    journal: str
    visibility_seconds: int
    die: str
    die_after: int
    seed: int

    def as_json(self) -> str:
        """Return the orders as one line."""
        return json.dumps(asdict(self))


def main() -> None:
    """Work until told to stop, or until the foretold moment."""
    orders = Orders(**json.loads(sys.stdin.readline()))
    threading.Thread(target=_die_with_parent, daemon=True).start()
    settings = Settings()
    if settings.database_url is None:
        sys.exit("the database is not named")
    url = database_url(settings.database_url.get_secret_value())
    engine = database_engine(url.update_query_dict({"options": f"-csearch_path={orders.schema}"}))
    client = sqs_client(orders.queue_url)
    lose_acks(client, random.Random(orders.seed))  # noqa: S311 - choices of the demo, no secrets
    SqsWorker(
        orders.queue_url,
        inbox=Inbox(SUBSCRIBER),
        engine=engine,
        handler=_deadly(orders.die_after) if orders.die == "handling" else add_purchase,
        wait_seconds=1,
        visibility_seconds=orders.visibility_seconds,
        client=client,
        hooks=[Journal(Path(orders.journal)), *_crash_points(orders)],
    ).run()


def _crash_points(orders: Orders) -> list[Hook]:
    match orders.die:
        case "received":
            return [kill_at(Received, after=orders.die_after)]
        case "committed":
            return [kill_at(Committed, after=orders.die_after)]
        case _:
            return []


def _deadly(after: int) -> Callable[[Session, Message], None]:
    """Make a handler that kills the process between the insert into the inbox and the commit."""
    handled = 0

    def handler(session: Session, message: Message) -> None:
        nonlocal handled
        handled += 1
        add_purchase(session, message)
        if handled >= after:
            os.kill(os.getpid(), signal.SIGKILL)

    return handler


def lose_acks(client: "SQSClient", chance: random.Random) -> None:
    """Have some acks confirmed but not carried out.

    SQS's standard queues may do that: a server that holds a copy of the message is unavailable when it is deleted,
    and "you might get that message copy again when you receive messages" (SQS Developer Guide, At-least-once
    delivery).
    """
    lost = threading.local()

    def before(params: dict[str, Any], **_: Any) -> None:
        lost.entries = [entry for entry in params["Entries"][1:] if chance.random() < LOST_ACK_SHARE]
        params["Entries"] = [entry for entry in params["Entries"] if entry not in lost.entries]

    def after(parsed: dict[str, Any], **_: Any) -> None:
        if "Successful" in parsed:
            parsed["Successful"].extend({"Id": entry["Id"]} for entry in lost.entries)

    client.meta.events.register("provide-client-params.sqs.DeleteMessageBatch", before)
    client.meta.events.register("after-call.sqs.DeleteMessageBatch", after)


def _die_with_parent() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
