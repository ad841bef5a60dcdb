"""An order, and the message that tells others about it, in one transaction."""

import json
import os
import sys

from sqlalchemy import create_engine, text

from txbox import Outbox

engine = create_engine(os.environ["TXBOX_DATABASE_URL"])
outbox = Outbox()


def place(order_id: str, customer: str, cents: int) -> bool:
    """Store an order and publish it; False if it was placed before."""
    order = {"order_id": order_id, "customer": customer, "cents": cents}
    with engine.begin() as connection:
        connection.execute(
            text("CREATE TABLE IF NOT EXISTS shop_order (order_id text PRIMARY KEY, customer text, cents bigint)")
        )
        placed = connection.execute(
            text("INSERT INTO shop_order VALUES (:order_id, :customer, :cents) ON CONFLICT DO NOTHING"), order
        )
        if not placed.rowcount:
            return False
        # Sent if this transaction commits, never if it is rolled back; the orders of a customer in their order.
        outbox.publish(connection, os.environ["QUEUE_URL"], json.dumps(order), key=customer)
        if cents <= 0:
            raise ValueError(f"order {order_id} costs nothing")  # takes the order and its message back
    return True


if __name__ == "__main__":
    print("placed" if place(sys.argv[1], sys.argv[2], int(sys.argv[3])) else "was placed before")
