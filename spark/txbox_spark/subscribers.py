"""A subscriber that nobody knows yet: perhaps a new one, perhaps a name that is spelt wrongly."""

import logging

from sqlalchemy import Engine

from txbox.postgres.transactions import short_transaction
from txbox_spark.merging.statements import LoadStatements
from txbox_spark.runtime.retries import retry_outages

__all__ = ["warn_of_new_subscriber"]


@retry_outages
def warn_of_new_subscriber(engine: Engine, statements: LoadStatements, subscriber_id: str) -> None:
    """Log a warning if a subscriber has no id in the inbox, and others have: every event will be new to it."""
    with short_transaction(engine) as connection:
        if connection.exec_driver_sql(statements.any_processed, (subscriber_id,)).first() is not None:
            return
        others = connection.exec_driver_sql(statements.some_subscribers).scalars().all()
    if others:
        _log.warning("%s has no id in the inbox; there are ids of %s", subscriber_id, ", ".join(others))


_log = logging.getLogger("txbox")
