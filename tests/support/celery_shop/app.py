"""Tasks for the tests; workers of it, and those who send to it, find their servers in the environment."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from celery import Celery
from celery.concurrency.asynpool import AsynPool
from sqlalchemy import create_engine, event, text
from sqlalchemy.orm import Session

from support.waiting import wait_until
from support.workers.business import APPLY
from txbox import Inbox
from txbox_celery import inbox_task

VISIBILITY_SECONDS = 2
AGAIN_SECONDS = 0.2

app = Celery("shop", broker=os.environ["SHOP_REDIS_URL"], backend=os.environ["SHOP_RESULTS_URL"])
app.conf.broker_transport_options = {"visibility_timeout": VISIBILITY_SECONDS}
app.conf.worker_prefetch_multiplier = 1
app.conf.broker_connection_retry_on_startup = True
# Celery misses the end of some processes of a pool, and counts them every five seconds.
AsynPool.timers = property(lambda pool: {pool.maintain_pool: 0.2})

ENGINE = create_engine(os.environ["SHOP_DATABASE_URL"])
with ENGINE.connect():
    pass  # as a service may, before Celery forks: no two processes may use this connection
OF_INBOX: dict[str, Any] = {
    "inbox": Inbox("billing", wait_seconds=0.2),
    "engine": ENGINE,
    "again_seconds": AGAIN_SECONDS,
}


def once(what: str) -> bool:
    """Whether this is the first time, over all processes."""
    try:
        (Path(os.environ["SHOP_NOTES"]) / what).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


@inbox_task(app, bind=True, **OF_INBOX)
def buy(self: Any, session: Session, how: str = "") -> None:
    """Apply; ``how`` says what goes wrong the first time."""
    session.execute(APPLY, {"id": self.request.id, "body": str(self.request.retries)})
    if how == "die in the body" and once(self.request.id):
        os.kill(os.getpid(), signal.SIGKILL)
    if how.endswith("die after the commit") and once(self.request.id):
        _dying.append(how)
    if how == "retry" and once(self.request.id):
        raise self.retry(countdown=0.1)
    if how == "commit":
        session.execute(text("DO $$ BEGIN PERFORM 1; END $$"))
        session.connection().connection.dbapi_connection.cursor().execute("COMMIT")  # type: ignore[union-attr]
    if how == "meet":
        session.execute(
            text("UPDATE effect SET body = pg_backend_pid() WHERE message_id = :id"), {"id": self.request.id}
        )
        once(f"here is {self.request.id}")
        wait_until(
            lambda: len(list(Path(os.environ["SHOP_NOTES"]).glob("here is *"))) == 2, "both are here", timeout=10
        )
    if how == "sleep":
        Path(os.environ["SHOP_NOTES"], f"{self.request.id} sleeps").touch()
        time.sleep(30)  # not a wait: work that takes longer than the test


@inbox_task(app, autoretry_for=(ZeroDivisionError,), retry_backoff=False, default_retry_delay=0.1, **OF_INBOX)
def divide(session: Session, message_id: str) -> None:
    """Fail once, by an error for which Celery tries again."""
    session.execute(APPLY, {"id": message_id, "body": "divided"})
    if once(message_id):
        raise ZeroDivisionError


@inbox_task(app, message_id=lambda purchase_id: f"purchase {purchase_id}", **OF_INBOX)
def by_argument(session: Session, purchase_id: int) -> None:
    """Be known by an argument."""
    session.execute(APPLY, {"id": str(purchase_id), "body": ""})


@inbox_task(app, **OF_INBOX)
def answer(session: Session) -> None:
    """Return something, which cannot be."""
    session.execute(APPLY, {"id": "answer", "body": ""})
    return 42  # type: ignore[return-value]


_dying: list[str] = []


@event.listens_for(ENGINE, "checkin")
def die_after_the_commit(*_: object) -> None:
    """Before Celery hears of it: the process of the pool dies, or the whole worker."""
    if _dying == ["die after the commit"]:
        os.kill(os.getpid(), signal.SIGKILL)
    if _dying == ["all die after the commit"]:
        os.killpg(os.getpgrp(), signal.SIGKILL)
