"""A place to work in: a schema with the tables, and the queues."""

import secrets
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import URL, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.schema import CreateSchema, DropSchema

from txbox.postgres.sqlstates import is_retryable
from txbox.postgres.urls import database_engine
from txbox_aws.sqs import create_queue, delete_queue
from txbox_demo import billing, shop
from txbox_migrations import upgrade_database

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

__all__ = ["Place", "open_place"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where one act plays.

    Attributes:
        schema: the schema of the tables, txbox's and the services'.
        url: the database, with that schema as its search path.
        engine: the same.
        purchases_url: the queue from the shop to billing.
        notifications_url: the queue from billing to notification.
    """

    schema: str
    url: URL
    engine: Engine
    purchases_url: str
    notifications_url: str

    @property
    def queue_urls(self) -> tuple[str, str]:
        """Both queues, in the order of the chain."""
        return self.purchases_url, self.notifications_url


def open_place(admin: Engine, url: URL, client: "SQSClient", cleanup: ExitStack, *, keep: bool) -> Place:
    """Create a schema with the tables, and two queues.

    Args:
        admin: the database.
        url: the same.
        client: an SQS client of boto3.
        cleanup: gets what is to be done at the end.
        keep: leave them behind.
    """
    schema = f"txbox_demo_{secrets.token_hex(4)}"
    here = url.update_query_dict({"options": f"-csearch_path={schema}"})
    engine = database_engine(here)
    with admin.begin() as connection:
        connection.execute(CreateSchema(schema))
    if not keep:
        cleanup.callback(_drop_schema, admin, schema)
    cleanup.callback(engine.dispose)
    upgrade_database(admin, schema=schema)
    create_tables(engine)
    queue_urls = []
    for queue in ("purchases", "notifications"):
        queue_urls.append(create_queue(f"{schema.replace('_', '-')}-{queue}", client=client))
        if not keep:
            cleanup.callback(delete_queue, queue_urls[-1], client=client)
    return Place(schema, here, engine, *queue_urls)


def create_tables(engine: Engine) -> None:
    """Create the tables of the services."""
    for service in (shop, billing):
        service.create_tables(engine)


def _drop_schema(engine: Engine, schema: str) -> None:
    # The server may still be at work for processes that were killed a moment ago: it meets them in other orders.
    for tries_left in reversed(range(DROP_TRIES)):
        try:
            with engine.begin() as connection:
                connection.execute(DropSchema(schema, cascade=True))
            return
        except DBAPIError as error:
            if not (tries_left and is_retryable(error)):
                raise


DROP_TRIES = 10
"""How often the schema is tried to be dropped, if it is deadlocked each time."""
