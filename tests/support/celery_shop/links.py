"""Links of chains and chords, in an inbox and without one; each process notes which messages it sends and takes."""

import os
from typing import Any

from celery import Celery, signals
from celery.concurrency.asynpool import AsynPool
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from support.workers.business import APPLY
from txbox import Inbox
from txbox_celery import inbox_task

VISIBILITY_SECONDS = 4

app = Celery("links", broker=os.environ["SHOP_REDIS_URL"], backend=os.environ["SHOP_REDIS_URL"])
app.conf.broker_transport_options = {
    "visibility_timeout": VISIBILITY_SECONDS,
    "unacked_mutex_expire": VISIBILITY_SECONDS,  # of a worker that died while it held it
    "unacked_restore_interval": 1,
    "unacked_restore_throttle": 1,
}
app.conf.worker_prefetch_multiplier = 1
app.conf.broker_connection_retry_on_startup = True
# Celery misses the end of some processes of a pool, and counts them every five seconds.
AsynPool.timers = property(lambda pool: {pool.maintain_pool: 0.2})

ENGINE = create_engine(os.environ["SHOP_DATABASE_URL"])
NOTES = os.open(os.environ["SHOP_NOTES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
"""What is written outlives a SIGKILL of the process."""


@inbox_task(app, name="inbox", bind=True, inbox=Inbox("links", wait_seconds=0.2), engine=ENGINE, again_seconds=0.2)
def in_inbox(self: Any, session: Session) -> None:
    session.execute(APPLY, {"id": self.request.id, "body": ""})


@app.task(name="plain", bind=True, acks_late=True, reject_on_worker_lost=True)
def plain(self: Any) -> None:
    with Session(ENGINE) as session, session.begin():
        session.execute(APPLY, {"id": self.request.id, "body": ""})


@signals.before_task_publish.connect
def note_begun(headers: dict[str, Any], **_: Any) -> None:
    os.write(NOTES, f"begun {headers['id']}\n".encode())


@signals.after_task_publish.connect
def note_sent(headers: dict[str, Any], **_: Any) -> None:
    os.write(NOTES, f"sent {headers['id']}\n".encode())


@signals.task_received.connect
def note_taken(request: Any, **_: Any) -> None:
    os.write(NOTES, f"taken {request.id}\n".encode())
