"""DBOS: a workflow for each message, named by its id, with one transaction of a datasource."""

import threading

from dbos import DBOS, SetWorkflowID, SQLAlchemyDatasource
from sqlalchemy import text

from benchmarks.peers.feed import SCHEMA, Feed, wait_for_the_end
from benchmarks.shared.database import AMOUNT

UPDATE = text(f"UPDATE {SCHEMA}.account SET balance = balance + {AMOUNT} WHERE account_id = :account")


def main() -> None:
    """Enqueue, then work. A repeated id names the same workflow, which is enqueued once."""
    feed, begun = Feed(), threading.Event()
    url = feed.url.replace("postgresql://", "postgresql+psycopg://")
    datasource = SQLAlchemyDatasource.create(url, engine_kwargs={"pool_size": feed.connections})
    DBOS(config={"name": "peers", "system_database_url": url, "log_level": "ERROR", "application_version": "1"})

    @datasource.transaction
    def update(account: int) -> None:
        datasource.sql_session().execute(UPDATE, {"account": account})

    @DBOS.workflow(name="apply")
    def apply(account: int) -> None:
        begun.wait()  # the queue's first look at the database comes before the clock starts
        update(account)
        feed.count()

    DBOS.launch()
    DBOS.register_queue("peers", worker_concurrency=feed.connections, polling_interval_sec=0.05)
    for message_id, account in feed.deliveries:
        with SetWorkflowID(message_id):
            DBOS.enqueue_workflow("peers", apply, account)
    feed.deliveries = list(dict(feed.deliveries).items())
    feed.begin("dbos", f"worker_concurrency={feed.connections}, polling_interval_sec=0.05; enqueueing drops duplicates")
    begun.set()
    wait_for_the_end()


if __name__ == "__main__":
    main()
