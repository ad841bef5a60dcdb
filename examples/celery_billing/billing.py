"""The application with its task; run by itself, it sends purchases."""

import os

from celery import Celery
from sqlalchemy import create_engine, text

from txbox import Inbox
from txbox_celery import inbox_task

app = Celery("billing", broker=os.environ["BROKER_URL"], backend=os.environ["BROKER_URL"])
app.conf.broker_connection_retry_on_startup = True
engine = create_engine(os.environ["TXBOX_DATABASE_URL"])

PURCHASES = {"p-1": ("ann", 2500), "p-2": ("ann", 1999), "p-3": ("bob", 100)}
TABLE = "CREATE TABLE IF NOT EXISTS account (account_id text PRIMARY KEY, cents bigint)"


@inbox_task(app, inbox=Inbox("billing"), engine=engine)
def add_purchase(session, account_id, cents):
    """Add a purchase to its account, in the transaction that records the task's id."""
    session.execute(
        text(
            "INSERT INTO account VALUES (:account_id, :cents) "
            "ON CONFLICT (account_id) DO UPDATE SET cents = account.cents + excluded.cents"
        ),
        {"account_id": account_id, "cents": cents},
    )


def main():
    """Send each purchase twice, wait, and print the accounts."""
    with engine.begin() as connection:
        connection.exec_driver_sql(TABLE)
    for purchase_id, purchase in [*PURCHASES.items(), *PURCHASES.items()]:
        add_purchase.apply_async(purchase, task_id=purchase_id).get(timeout=60)
    with engine.connect() as connection:
        for row in connection.exec_driver_sql("SELECT account_id, cents FROM account ORDER BY 1"):
            print(*row)


if __name__ == "__main__":
    main()
