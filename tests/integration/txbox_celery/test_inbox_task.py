"""Tasks run by Celery's own tracer, without a worker: their arguments, and what autoretry leaves alone."""

from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from celery import Celery, Task
from celery.app.trace import trace_task
from celery.exceptions import Reject
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

from support.txbox.horizon import LONG_AGO, id_of, move_horizon
from support.workers.business import APPLY, Business
from txbox import AsyncInbox, Expired, Inbox, InvalidConfiguration, Mismatch
from txbox_celery import MessageParked, inbox_task


@pytest.fixture
def app() -> Iterator[Celery]:
    """An application whose broker is away."""
    app = Celery("away", broker="amqp://127.0.0.1:1//", set_as_current=False)
    app.conf.task_publish_retry = False
    app.conf.broker_transport_options = {"max_retries": 1, "interval_start": 0, "interval_step": 0}
    yield app
    app.close()


def test_a_body_that_runs_again_has_the_arguments_as_they_were_sent(app: Celery, engine: Engine) -> None:
    seen: list[list[str]] = []

    @inbox_task(app, inbox=Inbox("billing"), engine=engine)
    def buy(session: Session, goods: list[str]) -> None:
        seen.append(list(goods))
        goods.append("changed")
        if len(seen) == 1:
            session.execute(text("DO $$ BEGIN RAISE SQLSTATE '40P01'; END $$"))

    sent = ["apples"]
    buy.apply((sent,), task_id="again").get()
    assert (seen, sent) == ([["apples"], ["apples"]], ["apples"])


def test_what_cannot_be_sent_again_goes_back_to_the_broker_although_all_errors_are_retried(app: Celery) -> None:
    away = create_engine("postgresql+psycopg://127.0.0.1:1/away")

    @inbox_task(app, inbox=Inbox("billing"), engine=away, autoretry_for=(Exception,), dont_autoretry_for=(KeyError,))
    def buy(_session: Session) -> None:
        raise AssertionError

    ended = trace_task(buy, "away-1", (), {}, {"id": "away-1", "delivery_info": {}}, app=app)
    rejected = ended.info.retval
    assert isinstance(rejected, Reject)
    assert rejected.requeue, "else the broker drops it"
    assert KeyError in buy.dont_autoretry_for


@pytest.mark.parametrize("how", ["self.retry", "autoretry_for"])
def test_a_retry_that_cannot_be_sent_goes_back_to_the_broker(
    app: Celery, engine: Engine, business: Business, how: str
) -> None:
    options: dict[str, Any] = {"autoretry_for": (KeyError,)} if how == "autoretry_for" else {}

    @inbox_task(app, inbox=Inbox("billing"), engine=engine, bind=True, **options)
    def buy(self: Any, session: Session, item: object) -> None:
        session.execute(APPLY, {"id": "tea", "body": ""})
        raise KeyError if options else self.retry(args=[item])

    requeued = []
    for item in ("tea", object()):  # the second one no try can send
        ended = trace_task(buy, "r-1", (item,), {}, {"id": "r-1", "args": (item,), "delivery_info": {}}, app=app)
        assert isinstance(ended.info.retval, Reject)
        requeued.append(ended.info.retval.requeue)
    assert requeued == [True, False]
    assert business.applied() == {}


@pytest.mark.parametrize("error", [MessageParked, Mismatch, Expired])
def test_what_is_not_to_be_run_fails_and_is_not_retried(
    app: Celery, engine: Engine, business: Business, error: type[Exception]
) -> None:
    task_id, inbox = id_of(LONG_AGO), Inbox("billing", fingerprint=True)

    @inbox_task(app, inbox=inbox, engine=engine, autoretry_for=(Exception,))
    def buy(_session: Session) -> None:
        raise AssertionError

    if error is Expired:
        move_horizon(engine)
    else:
        with engine.begin() as connection:
            inbox.record(connection, task_id, b"another" if error is Mismatch else b"[[], {}]")
            if error is MessageParked:
                connection.exec_driver_sql("UPDATE processed_message SET dead_letter_id = 1")
    ended = trace_task(buy, task_id, (), {}, {"id": task_id, "delivery_info": {}}, app=app)
    assert ended.info.state == "FAILURE"
    assert isinstance(ended.info.retval, error)


def test_where_tables_are_missing_each_try_is_logged_and_nothing_is_lost(
    app: Celery, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    @inbox_task(app, inbox=Inbox("billing"), engine=engine)
    def buy(_session: Session) -> None:
        raise AssertionError

    with engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE processed_message CASCADE")
    ended = trace_task(buy, "t-1", (), {}, {"id": "t-1", "delivery_info": {}}, app=app)
    assert isinstance(ended.info.retval, Reject), "its broker is away"
    assert ended.info.retval.requeue
    (record,) = [record for record in caplog.records if record.levelname == "ERROR" and "sent again" in record.message]
    assert "txbox db upgrade" in record.message


def test_a_base_that_the_application_is_given_later_holds(engine: Engine) -> None:
    app = Celery("later", broker="memory://", set_as_current=False)

    @inbox_task(app, inbox=Inbox("billing"), engine=engine)
    def buy(_session: Session) -> None:
        raise AssertionError

    class InContext(Task):
        abstract = True

    app.Task = InContext
    assert isinstance(buy._get_current_object(), InContext)


def test_only_an_inbox_with_fingerprints_needs_arguments_of_a_stable_form(app: Celery, engine: Engine) -> None:
    def buy(_session: Session, _goods: Any) -> None:
        """Do nothing."""

    plain = inbox_task(app, inbox=Inbox("plain"), engine=engine, name="plain")(buy)
    strict = inbox_task(app, inbox=Inbox("strict", fingerprint=True), engine=engine, name="strict")(buy)
    for number, goods in enumerate(({(1, 2): 3}, {1: 2, "a": 3}, {4, 5}, object())):
        assert plain.apply((goods,), task_id=f"{number}").get() is None
        with pytest.raises(TypeError, match="no stable form"):
            strict.apply((goods,), task_id=f"{number}").get()
    for _ in range(2):
        assert strict.apply(([Decimal(1), datetime(2026, 1, 2, tzinfo=UTC)],), task_id="stable").get() is None


@pytest.mark.parametrize(("near", "right"), [("mesage_id", "message_id"), ("binds", "bind")])
def test_a_misspelt_option_is_refused(app: Celery, engine: Engine, near: str, right: str) -> None:
    with pytest.raises(TypeError, match=f"no option {near}; did you mean {right}"):
        inbox_task(app, inbox=Inbox("billing"), engine=engine, **{near: None})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["acks_late", "reject_on_worker_lost"])
def test_an_ack_before_the_commit_is_refused(app: Celery, engine: Engine, name: str) -> None:
    with pytest.raises(InvalidConfiguration, match=f"inbox_task.{name} must be True"):
        inbox_task(app, inbox=Inbox("billing"), engine=engine, **{name: False})
    assert getattr(inbox_task(app, inbox=Inbox("billing"), engine=engine)(plain), name) is True


async def coroutine(_session: Session) -> None: ...


def generator(_session: Session) -> Iterator[None]:
    yield


def plain(_session: Session) -> None: ...


@pytest.mark.parametrize(
    ("inbox", "body", "says"),
    [
        (Inbox("billing"), coroutine, "must be a plain function"),
        (Inbox("billing"), generator, "must be a plain function"),
        (AsyncInbox("billing"), plain, "must be an Inbox, not AsyncInbox"),
    ],
)
def test_what_cannot_work_is_refused_at_decoration(
    app: Celery, engine: Engine, inbox: Any, body: Any, says: str
) -> None:
    with pytest.raises(InvalidConfiguration, match=says):
        inbox_task(app, inbox=inbox, engine=engine)(body)
