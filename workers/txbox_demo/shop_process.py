"""One process of the shop: places its share of the orders, and goes on where a killed one was."""

import os
import random
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import attrgetter

from sqlalchemy.orm import Session

from txbox.outbox.outbox import Outbox
from txbox_demo.journal import Journal
from txbox_demo.orders import Orders
from txbox_demo.purchases import Purchase, read_purchases
from txbox_demo.shop import place_order, read_orders

__all__ = ["DECLINED", "INSERTED", "PLACED", "run_shop", "share_of"]

DECLINED_SHARE = 0.05
"""Of all orders: written down and published, and then the card is declined. Rolled back, and placed anew."""

PLACED = "placed"
DECLINED = "declined"
"""What the journal says, after the transaction has ended."""

INSERTED = "inserted"
"""A moment to die: between the inserts and the commit."""

_DECLINED_SUFFIX = "-declined"
"""Ends the ids of orders that are rolled back: sent all the same, they could not pass for duplicates."""


def run_shop(orders: Orders) -> None:
    """Place every order of this share that is not placed, or die on the way.

    Args:
        orders: what to do.
    """
    engine, outbox = orders.engine(), Outbox()
    journal = Journal(orders.journal)
    chance = random.Random(orders.seed)  # noqa: S311 - choices of the demo, no secrets
    with engine.connect() as connection:
        placed = read_orders(connection).keys()
    share = share_of(list(read_purchases(orders.purchases)), orders.slot, orders.slots)
    for number, purchase in enumerate((one for one in share if one.event_id not in placed), start=1):
        if chance.random() < DECLINED_SHARE:
            declined = replace(purchase, event_id=f"{purchase.event_id}{_DECLINED_SUFFIX}")
            with Session(engine) as session:
                place_order(session, outbox, orders.purchases_url, declined)
                session.rollback()
            journal.note(DECLINED, [declined.event_id])
        with Session(engine) as session, session.begin():
            place_order(session, outbox, orders.purchases_url, purchase)
            if orders.moment == INSERTED and number >= orders.life:
                os.kill(os.getpid(), signal.SIGKILL)
        journal.note(PLACED, [purchase.event_id])
    engine.dispose()


def share_of(purchases: Sequence[Purchase], slot: int, slots: int) -> Iterator[Purchase]:
    """Give the orders of one process in the order of their dates. All of one customer's are in one share.

    Args:
        purchases: of all processes.
        slot: which share, from 0.
        slots: how many there are.
    """
    by_date = sorted(purchases, key=attrgetter("date"))  # stable: a day's purchases stay as the file has them
    return (purchase for purchase in by_date if int(purchase.customer_id) % slots == slot)
