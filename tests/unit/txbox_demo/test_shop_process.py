"""A process of the shop: what it commits is published, what it rolls back is not, and a killed one is no loss."""

import random
import signal
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Engine, text

from txbox_demo import shop_process
from txbox_demo.fork_server import ForkServer
from txbox_demo.journal import read_notes
from txbox_demo.orders import Orders
from txbox_demo.purchases import read_purchases
from txbox_demo.shop import read_orders
from txbox_demo.shop_process import DECLINED, INSERTED, PLACED, run_shop, share_of

MakeOrders = Callable[..., Orders]


@pytest.fixture
def server() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.stop()


def published(engine: Engine) -> list[tuple[str, str]]:
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT message_id, key FROM outbox_message ORDER BY message_id"))
        return [(row.message_id, row.key) for row in rows]


def test_each_order_is_placed_and_published_and_none_that_was_rolled_back(
    services: Engine, schema_url: str, make_orders: MakeOrders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shop_process, "DECLINED_SHARE", 0.5)
    orders = make_orders(database_url=schema_url, purchases=60, seed=1)
    run_shop(orders)
    by_file = {purchase.event_id: purchase for purchase in read_purchases(60)}
    with services.connect() as connection:
        assert read_orders(connection) == by_file
    assert published(services) == [(name, purchase.customer_id) for name, purchase in by_file.items()]
    notes = read_notes(orders.journal.parent, "shop")
    assert notes[PLACED] == dict.fromkeys(by_file, 1)
    assert 10 < len(notes[DECLINED]) < 50
    assert not notes[DECLINED].keys() & by_file.keys()


def test_one_that_was_killed_between_insert_and_commit_is_gone_on_with(
    services: Engine, schema_url: str, make_orders: MakeOrders, server: ForkServer
) -> None:
    doomed = make_orders(database_url=schema_url, moment=INSERTED, life=3)
    server.fork(doomed)
    assert server.wait([doomed], 30) == []
    assert server.status(doomed) == -signal.SIGKILL
    assert len(published(services)) == 2
    run_shop(make_orders(database_url=schema_url, number=2))
    by_file = {purchase.event_id: purchase for purchase in read_purchases(20)}
    with services.connect() as connection:
        assert read_orders(connection) == by_file
    assert [name for name, _ in published(services)] == sorted(by_file)
    assert read_notes(doomed.journal.parent, "shop")[PLACED] == dict.fromkeys(by_file, 1)


def test_shares_are_by_date_and_keep_each_customer_together() -> None:
    purchases = list(read_purchases(500))
    shuffled = random.Random(1).sample(purchases, len(purchases))
    shares = [list(share_of(shuffled, slot, 3)) for slot in range(3)]
    assert sorted(one.event_id for share in shares for one in share) == [one.event_id for one in purchases]
    customers = [{one.customer_id for one in share} for share in shares]
    assert sum(map(len, customers)) == len(set.union(*customers))
    for share in shares:
        assert [one.date for one in share] == sorted(one.date for one in share)
