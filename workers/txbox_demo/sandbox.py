"""What a run works in: a schema with the tables, and two queues. It also reads how far the run is."""

import secrets
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.schema import CreateSchema, DropSchema

from txbox.messages.destinations import INBOX
from txbox.postgres.urls import database_engine, database_url
from txbox_aws.sqs import create_queue, delete_queue, queue_backlog
from txbox_demo import checker, services
from txbox_migrations import upgrade_database


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is: its stage, processes killed, messages past each step, and those in outbox and queues."""

    stage: str
    killed: int = 0
    placed: int = 0
    billed: int = 0
    notified: int = 0
    waiting: int = 0


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A schema, the database with that schema as its search path, and the queues of billing and notification.

    Without a client of SQS, ``queue_urls`` are destinations in this database, and there are no queues.
    """

    schema: str
    url: str
    engine: Engine
    client: Any
    queue_urls: tuple[str, ...]

    @classmethod
    def open(cls, url: str, client: Any, cleanup: ExitStack, *, keep: bool) -> "Sandbox":
        """Create schema, tables and queues. ``cleanup`` removes them unless they are kept."""
        schema = f"txbox_demo_{secrets.token_hex(4)}"
        own_url = database_url(url).update_query_dict({"options": f"-csearch_path={schema}"})
        engine = database_engine(own_url)
        cleanup.callback(engine.dispose)
        with engine.begin() as connection:
            connection.execute(CreateSchema(schema))
        if not keep:
            cleanup.callback(_drop_schema, engine, schema)
        upgrade_database(engine, schema=schema)
        with engine.begin() as connection:
            connection.exec_driver_sql(f"{services.TABLES};{checker.TABLES}")
        queue_urls = [] if client else [f"{INBOX}billing", f"{INBOX}notification"]
        for name in ("purchases", "notifications") if client else ():
            queue_urls.append(create_queue(f"{schema.replace('_', '-')}-{name}", client=client))
            if not keep:
                cleanup.callback(delete_queue, queue_urls[-1], client=client)
        return cls(schema, own_url.render_as_string(hide_password=False), engine, client, tuple(queue_urls))

    def progress(self, stage: str, killed: int) -> Progress:
        """Read what has happened, then what waits, in the chain's order: what has left one place is in the next."""
        placed = self.count("purchase_order")
        billed = self.count("processed_message WHERE subscriber_id = 'billing' AND dead_letter_id IS NULL")
        notified = self.count("message_lease WHERE subscriber_id = 'notification' AND completed_at IS NOT NULL")
        waiting, outbox = 0, "outbox_message"
        if self.client is None:
            return Progress(stage, killed, placed, billed, notified, self.count(outbox))
        for queue_url in self.queue_urls:
            waiting += self.count(outbox)  # again before the second queue: billing has published since
            waiting += sum(queue_backlog(queue_url, client=self.client).values())
        return Progress(stage, killed, placed, billed, notified, waiting)

    def count(self, rows: str) -> int:
        """Return the number of rows in a table; ``rows`` may include a condition."""
        with self.engine.connect() as connection:
            return int(connection.execute(text(f"SELECT count(*) FROM {rows}")).scalar_one())  # noqa: S608 - ours


def _drop_schema(engine: Engine, schema: str) -> None:
    for tries_left in reversed(range(10)):  # it may deadlock: the server may still work for killed processes
        with suppress(OperationalError) if tries_left else nullcontext(), engine.begin() as connection:
            connection.execute(DropSchema(schema, cascade=True))
            return
