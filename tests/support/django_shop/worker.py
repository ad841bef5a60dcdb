"""The worker that ``manage.py txbox_worker`` runs in the tests."""

import os
from typing import Any

from txbox import Inbox, Message
from txbox import instrumentation as events
from txbox.testing import kill_at
from txbox_aws.sqs import SqsWorker
from txbox_django import orm_worker


def handle(message: Message) -> None:
    """Apply a message."""
    from support.django_shop.models import Purchase

    Purchase.objects.create(message_id=message.id)


def make_worker() -> SqsWorker:
    """Make it: of the queue that the environment names, and killed at the moment that it names."""
    moment = os.environ.get("KILL_AT")
    hooks: list[Any] = [kill_at(getattr(events, moment))] if moment else []
    return orm_worker(
        SqsWorker,
        os.environ["QUEUE_URL"],
        inbox=Inbox("billing"),
        handler=handle,
        hooks=hooks,
        wait_seconds=1,
        visibility_seconds=1,
    )
