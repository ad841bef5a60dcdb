"""A subscriber without ids in the inbox: perhaps a new one, perhaps a name that is spelt wrongly."""

import logging

from sqlalchemy import Engine

from txbox.postgres.sql_files import SqlFile
from txbox.postgres.transactions import short_transaction
from txbox_spark.runtime.retries import retry_outages


class SubscriberStatements(SqlFile, file="subscribers.sql"):
    """The statements of subscribers.sql, for the tables of one schema, under one prefix."""

    any_processed: str
    some_subscribers: str


@retry_outages
def warn_of_new_subscriber(engine: Engine, schema: str | None, prefix: str, subscriber_id: str) -> None:
    """Log a warning if a subscriber has no id in the inbox, and others have: every event will be new to it."""
    sql = SubscriberStatements.load(schema, prefix)
    with short_transaction(engine) as connection:
        if connection.exec_driver_sql(sql.any_processed, {"subscriber_id": subscriber_id}).first() is not None:
            return
        others = connection.exec_driver_sql(sql.some_subscribers).scalars().all()
    if others:
        _log.warning("%s has no id in the inbox; there are ids of %s", subscriber_id, ", ".join(others))


_log = logging.getLogger("txbox.spark")
