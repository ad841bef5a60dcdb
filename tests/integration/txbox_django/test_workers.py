"""Handlers with Django's ORM, in the worker's transaction."""

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import DatabaseError, IntegrityError, connection, connections, transaction
from sqlalchemy import Engine, create_engine

from support.django_shop import project
from support.workers.business import Business
from support.workers.memory_worker import AT_ONCE, at_work, numbered
from txbox import Inbox, InvalidConfiguration, Message, Outbox
from txbox_aws.sqs import AsyncSqsWorker
from txbox_django import orm_worker
from txbox_django.engine import lent
from txbox_workers.memory_source import MemorySource
from txbox_workers.worker import Worker

pytestmark = pytest.mark.usefixtures("django")

Handler = Callable[[Message], object]
WorkOff = Callable[..., None]


def purchase(message: Message) -> None:
    from support.django_shop.models import Purchase

    Purchase.objects.create(message_id=message.id, details={"colour": message.headers["colour"]})


@pytest.fixture
def work_off(lendable: Engine) -> WorkOff:
    return partial(_work_off, lendable)


def _work_off(
    engine: Engine, count: int, handler: Handler | None = purchase, again: int = 0, batch_size: int = 10, **options: Any
) -> None:
    source = MemorySource([*numbered(count), *numbered(again)], batch_size=batch_size)
    options.setdefault("inbox", Inbox("billing", wait_seconds=0.2))
    worker = orm_worker(Worker, source, handler=handler, engine=engine, backoff=AT_ONCE, **options)
    with at_work(worker):
        assert source.wait_until_empty(30), "something was never acked"


def test_messages_are_applied_once_in_order(engine: Engine, work_off: WorkOff) -> None:
    from support.django_shop.models import Purchase

    work_off(25, again=25)
    assert project.purchases() == [message.id for message in numbered(25)]
    assert {one.details["colour"] for one in Purchase.objects.all()} == {"red"}
    assert Business(engine).recorded() == set(project.purchases())


def test_a_failing_handler_takes_back_what_it_did_and_the_others_commit(engine: Engine, work_off: WorkOff) -> None:
    def fail_once_written(message: Message) -> None:
        purchase(message)
        if message.id == "m0003":
            raise ValueError(message.id)

    work_off(10, fail_once_written, max_attempts=2)
    assert project.purchases() == [message.id for message in numbered(10) if message.id != "m0003"]
    assert Business(engine).letters() == {"m0003": "failed"}


def swallow_an_error(message: Message) -> None:
    purchase(message)
    with suppress(DatabaseError):
        connection.cursor().execute("SELECT 1 / 0")


def leave_it_marked(message: Message) -> None:
    purchase(message)
    transaction.set_rollback(True)


def commit(message: Message) -> None:
    purchase(message)
    connection.cursor().execute("COMMIT")


def commit_by_django(message: Message) -> None:
    purchase(message)
    transaction.commit()


def close(message: Message) -> None:
    purchase(message)
    connection.close()


def insist_on_the_outermost(message: Message) -> None:
    with transaction.atomic(durable=True):
        purchase(message)


BAD: list[Handler] = [swallow_an_error, leave_it_marked, commit, commit_by_django, close, insist_on_the_outermost]


@pytest.mark.parametrize("bad", BAD)
def test_no_handler_can_end_the_transaction_or_lose_its_effects_in_silence(
    engine: Engine, bad: Handler, work_off: WorkOff
) -> None:
    def handle(message: Message) -> None:
        (bad if message.id == "m0001" else purchase)(message)

    work_off(3, handle, max_attempts=2)
    assert project.purchases() == ["m0000", "m0002"]
    assert Business(engine).letters() == {"m0001": "failed"}


def test_a_connection_that_is_lost_in_a_handler_is_no_attempt(engine: Engine, work_off: WorkOff) -> None:
    attempts: Counter[str] = Counter()

    def handle(message: Message) -> None:
        purchase(message)
        attempts[message.id] += 1
        if attempts[message.id] == 1:
            connection.cursor().execute("SELECT pg_terminate_backend(pg_backend_pid())")

    work_off(1, handle, max_attempts=1)
    assert project.purchases() == ["m0000"]
    assert (attempts["m0000"], Business(engine).letters()) == (2, {})


def test_atomic_in_a_handler_is_a_savepoint(work_off: WorkOff) -> None:
    def handle(message: Message) -> None:
        with suppress(IntegrityError), transaction.atomic():
            purchase(Message("never", b"", message.headers))
            raise IntegrityError
        with transaction.atomic():
            purchase(message)

    work_off(3, handle)
    assert project.purchases() == ["m0000", "m0001", "m0002"]


def test_on_commit_follows_the_commit_and_only_a_commit(work_off: WorkOff) -> None:
    attempts: Counter[str] = Counter()
    called: list[tuple[str, bool]] = []

    def note(message_id: str) -> None:
        called.append((message_id, message_id in project.purchases()))

    def handle(message: Message) -> None:
        purchase(message)
        attempts[message.id] += 1
        transaction.on_commit(lambda: note(message.id))
        with suppress(IntegrityError), transaction.atomic():
            transaction.on_commit(lambda: note("never"))
            raise IntegrityError
        if message.id == "m0001":
            transaction.on_commit(lambda: called.append(1 / 0))  # type: ignore[arg-type]
        if message.id == "m0002" and attempts[message.id] < 3:
            raise ValueError

    work_off(4, handle)
    assert sorted(called) == [(message.id, True) for message in numbered(4)]
    assert attempts["m0000"] == 2  # in a batch that was rolled back, and alone


def test_callbacks_of_what_was_rolled_back_do_not_wait_for_another_commit(work_off: WorkOff) -> None:
    called: list[str] = []

    def handle(message: Message) -> None:
        purchase(message)
        transaction.on_commit(lambda: called.append(message.id))
        if message.id == "m0002":
            raise ValueError

    work_off(1)
    # The batch is rolled back after m0001; then m0000, a duplicate, is the first to commit, and no handler ran in it.
    work_off(3, handle, max_attempts=2)
    assert called == ["m0001"]


def test_threads_have_a_transaction_each(work_off: WorkOff) -> None:
    together = threading.Barrier(2)
    backends: set[int] = set()

    def handle(message: Message) -> None:
        purchase(message)
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            backends.add(cursor.fetchone()[0])
        together.wait(10)

    work_off(8, handle, threads=2, batch_size=1)
    assert sorted(project.purchases()) == [message.id for message in numbered(8)]
    assert len(backends) >= 2


def test_a_batch_handler_writes_in_bulk_and_publishes(engine: Engine, work_off: WorkOff) -> None:
    from support.django_shop.models import Purchase

    def handle(messages: list[Message]) -> None:
        Purchase.objects.bulk_create([Purchase(message_id=message.id) for message in messages])
        for message in messages:
            Outbox().publish(connection, "own:mail", message.body)

    work_off(20, None, batch_handler=handle)
    assert project.purchases() == [message.id for message in numbered(20)]
    with engine.connect() as other:
        assert other.exec_driver_sql("SELECT count(*) FROM outbox_message").scalar_one() == 20


@dataclass(frozen=True)
class Order:
    colour: str


def test_a_handler_is_given_a_message_type_by_its_annotations(engine: Engine, lendable: Engine) -> None:
    from support.django_shop.models import Purchase

    def handle(order: Order, message: Message) -> None:
        Purchase.objects.create(message_id=message.id, details={"colour": order.colour})

    source = MemorySource([Message("good", b'{"colour": "red"}'), Message("bad", b"{}")])
    inbox = Inbox("billing")
    worker = orm_worker(Worker, source, handler=handle, inbox=inbox, engine=lendable, backoff=AT_ONCE, max_attempts=2)
    with at_work(worker):
        assert source.wait_until_empty(30)
    assert list(Purchase.objects.values_list("message_id", "details")) == [("good", {"colour": "red"})]
    assert Business(engine).letters() == {"bad": "malformed"}


async def coroutine(message: Message) -> None: ...


@pytest.mark.parametrize(
    ("kind", "changes", "told"),
    [
        (Worker, {"handler": None}, "Worker"),
        (Worker, {"handler": lambda: None}, "Worker"),
        (Worker, {"handler": coroutine}, "async_to_sync"),
        (Worker, {"engine": create_engine("postgresql+psycopg://")}, "database_engine"),
        (AsyncSqsWorker, {}, "SqsWorker or Worker, not AsyncSqsWorker"),
    ],
)
def test_what_cannot_be_a_worker_is_refused_at_once(
    lendable: Engine, kind: Any, changes: dict[str, Any], told: str
) -> None:
    arguments = {"inbox": Inbox("billing"), "engine": lendable, "handler": purchase, **changes}
    with pytest.raises(InvalidConfiguration, match=told) as refused:
        orm_worker(kind, MemorySource(), **arguments)
    assert "call asyncio.run" not in str(refused.value)


def test_an_engine_of_django_s_with_options_can_be_lent(lendable: Engine) -> None:
    serializable = lendable.execution_options(isolation_level="SERIALIZABLE")
    orm_worker(Worker, MemorySource(), inbox=Inbox("billing"), engine=serializable, handler=purchase)


def test_a_coroutine_with_the_orm_s_async_methods_is_in_the_transaction(work_off: WorkOff) -> None:
    async def buy(message: Message) -> None:
        from support.django_shop.models import Purchase

        await Purchase.objects.acreate(message_id=message.id)
        if message.id == "m0001":
            raise ValueError

    work_off(2, lambda message: async_to_sync(buy)(message), max_attempts=2)
    assert project.purchases() == ["m0000"]


def test_django_s_own_connection_of_the_thread_is_as_it_was(lendable: Engine) -> None:
    before = connections["default"]
    with lendable.connect() as worker_s:
        worker_s.exec_driver_sql("CREATE TEMPORARY TABLE seen AS SELECT '{}'::jsonb AS details")
        with lent(worker_s.connection.dbapi_connection, "default") as borrowed:
            assert connections["default"] is borrowed
            with connection.cursor() as cursor:
                cursor.execute("SELECT details FROM seen")
                assert cursor.fetchone() == ("{}",)  # Django reads it by itself
        assert connections["default"] is before
        assert worker_s.exec_driver_sql("SELECT details FROM seen").scalar_one() == {}


def test_a_server_that_does_not_answer_is_waited_for_as_by_other_engines(lendable: Engine) -> None:
    with lendable.connect() as connection:
        driver = connection.connection.driver_connection
        assert driver is not None
        parameters = driver.info.get_parameters()
    assert (parameters["connect_timeout"], parameters["keepalives_idle"]) == ("10", "15")
