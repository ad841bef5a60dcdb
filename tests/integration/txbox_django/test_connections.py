"""Django's own connection holds the transaction: inbox and outbox take it as it is."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from threading import Barrier

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import IntegrityError, connection, connections, transaction
from sqlalchemy import Engine

from support.django_shop import project
from support.txbox.horizon import LONG_AGO, id_of, move_horizon
from txbox import Expired, Inbox, InFlight, NotInTransaction, Outbox
from txbox.watermarks import Watermarks

pytestmark = pytest.mark.usefixtures("django")

INBOX = Inbox("billing", wait_seconds=0.2)


def apply(message_id: str) -> bool:
    from support.django_shop.models import Purchase

    with transaction.atomic():
        first = INBOX.record(connection, message_id, sent_at=datetime.now(UTC))
        if first:
            Purchase.objects.create(message_id=message_id)
            Outbox().publish(connection, "own:mail", message_id, key="k")
            Watermarks("billing").advance(connection, "account", "1", 1)
    return first


def count(engine: Engine, table: str) -> int:
    with engine.connect() as other:
        return int(other.exec_driver_sql(f"SELECT count(*) FROM {table}").scalar_one())


def test_a_message_is_applied_once_with_what_it_publishes(engine: Engine) -> None:
    assert [apply("m1"), apply("m1")] == [True, False]
    assert project.purchases() == ["m1"]
    assert (count(engine, "processed_message"), count(engine, "outbox_message")) == (1, 1)


def test_what_is_rolled_back_comes_again(engine: Engine) -> None:
    with suppress(ZeroDivisionError), transaction.atomic():
        INBOX.record(connection, "m1")
        raise ZeroDivisionError
    assert count(engine, "processed_message") == 0
    assert apply("m1")


def test_outside_of_a_transaction_it_is_refused() -> None:
    with pytest.raises(NotInTransaction):
        INBOX.record(connection, "m1")


def test_a_savepoint_that_is_rolled_back_takes_its_record_with_it() -> None:
    called: list[str] = []
    with transaction.atomic():
        INBOX.record(connection, "outer")
        transaction.on_commit(lambda: called.append("outer"))
        with suppress(IntegrityError), transaction.atomic():
            INBOX.record(connection, "inner")
            transaction.on_commit(lambda: called.append("inner"))
            raise IntegrityError
    assert called == ["outer"]
    assert [apply("outer"), apply("inner")] == [False, True]


def test_another_database_by_its_alias() -> None:
    with transaction.atomic(using="other"):
        assert INBOX.record(connections["other"], "m1")
    assert not apply("m1")


def test_two_threads_at_once_apply_it_once() -> None:
    together = Barrier(2)

    def race() -> str:
        together.wait(10)
        try:
            return str(apply("m1"))
        except InFlight:
            return "in flight"
        finally:
            connections.close_all()

    with ThreadPoolExecutor(2) as threads:
        came = sorted(future.result() for future in [threads.submit(race) for _ in range(2)])
    assert came in (["False", "True"], ["True", "in flight"])
    assert project.purchases() == ["m1"]


def test_a_coroutine_applies_it_in_one_function() -> None:
    async def view() -> list[bool]:
        return [await sync_to_async(apply)("m1"), await sync_to_async(apply)("m1")]

    assert async_to_sync(view)() == [True, False]


def test_one_from_before_the_horizon_is_refused_whatever_zone_django_reads_times_in(engine: Engine) -> None:
    move_horizon(engine)
    with pytest.raises(Expired):
        apply(id_of(LONG_AGO))
    assert apply("m1")
