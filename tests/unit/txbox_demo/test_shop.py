"""A process of the shop: what it commits is published, what it rolls back is not, and a killed one is no loss."""

import os
from collections.abc import Callable

import pytest
from sqlalchemy import Engine, text

from txbox_demo import processes
from txbox_demo.processes import INSERTED, N_ROLLED_BACK, DemoTask, run_shop
from txbox_demo.purchases import read_purchases

MakeTask = Callable[..., DemoTask]


class Died(BaseException):
    """Stands in for SIGKILL."""


@pytest.fixture(autouse=True)
def _engine(tables: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shop's engine is the test's."""
    monkeypatch.setattr(DemoTask, "engine", lambda _: tables)


def published(engine: Engine) -> list[tuple[str, str]]:
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT message_id, key FROM outbox_message ORDER BY message_id"))
        return [(row.message_id, row.key) for row in rows]


def orders(engine: Engine) -> list[tuple[str, str]]:
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT order_id, customer_id FROM purchase_order ORDER BY order_id"))
        return [(row.order_id, row.customer_id) for row in rows]


def test_each_order_is_placed_and_published_and_none_that_was_rolled_back(
    tables: Engine, make_task: MakeTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_happens", lambda _: True)
    task = make_task()
    run_shop(task)
    by_file = [(purchase.order_id, purchase.customer_id) for purchase in read_purchases(20)]
    assert orders(tables) == published(tables) == by_file
    assert task.counts[N_ROLLED_BACK] == 20


def test_the_next_shop_goes_on_where_a_killed_one_was(
    tables: Engine, make_task: MakeTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(_pid: int, _number: int) -> None:
        raise Died

    monkeypatch.setattr(os, "kill", die)
    with pytest.raises(Died):
        run_shop(make_task(moment=INSERTED, life=3))
    assert len(published(tables)) == 2
    run_shop(make_task())
    by_file = [(purchase.order_id, purchase.customer_id) for purchase in read_purchases(20)]
    assert orders(tables) == published(tables) == by_file


def test_shops_share_the_orders_and_each_has_all_of_a_customer(tables: Engine, make_task: MakeTask) -> None:
    customers: list[set[str]] = []
    for slot in range(3):
        before = set(orders(tables))
        run_shop(make_task(slot=slot, slots=3))
        customers.append({customer for _, customer in set(orders(tables)) - before})
    assert len(orders(tables)) == 20
    assert sum(map(len, customers)) == len(set.union(*customers))
