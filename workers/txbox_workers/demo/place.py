"""A place to work in: a schema with the tables, and a queue."""

import secrets
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import URL, Engine
from sqlalchemy.schema import CreateSchema, DropSchema

from txbox_migrations import upgrade_database
from txbox_workers.demo.billing import create_tables
from txbox_workers.settings import database_engine
from txbox_workers.sqs import create_queue, delete_queue

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

__all__ = ["Place", "open_place"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where one act plays.

    Attributes:
        schema: the schema of the tables, txbox's and the service's.
        url: the database, with that schema as its search path.
        engine: the same.
        queue_url: the queue.
    """

    schema: str
    url: URL
    engine: Engine
    queue_url: str


def open_place(admin: Engine, url: URL, client: "SQSClient", cleanup: ExitStack, *, keep: bool) -> Place:
    """Create a schema with the tables, and a queue.

    Args:
        admin: the database.
        url: the same.
        client: an SQS client of boto3.
        cleanup: gets what is to be done at the end.
        keep: leave both behind.
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
    queue_url = create_queue(schema.replace("_", "-"), client=client)
    if not keep:
        cleanup.callback(delete_queue, queue_url, client=client)
    return Place(schema, here, engine, queue_url)


def _drop_schema(engine: Engine, schema: str) -> None:
    with engine.begin() as connection:
        connection.execute(DropSchema(schema, cascade=True))
