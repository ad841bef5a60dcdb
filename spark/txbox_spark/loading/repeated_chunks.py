"""Which chunks seem to be known already: a file is loaded again, or an archive overlaps what was processed."""

from bisect import bisect_right
from collections.abc import Sequence

from sqlalchemy import Engine

from txbox.postgres.transactions import short_transaction
from txbox_spark.loading.statements import Statements
from txbox_spark.runtime.retries import patient

__all__ = ["likely_known"]


@patient
def likely_known(
    engine: Engine, statements: Statements, subscriber_id: str, sample: Sequence[str], bounds: Sequence[str]
) -> tuple[int, ...]:
    """Return the chunks of which every sampled id is in the inbox.

    That settles nothing. It only says for which chunks it is worth while to look at the ids alone first.

    Args:
        engine: the database.
        statements: for its tables.
        subscriber_id: who processes the events.
        sample: ids, evenly drawn.
        bounds: between the chunks.
    """
    with short_transaction(engine) as connection:
        known = set(connection.exec_driver_sql(statements.find_known, (subscriber_id, list(sample))).scalars())
    sampled = {bisect_right(bounds, one) for one in sample}
    return tuple(sorted(sampled - {bisect_right(bounds, one) for one in sample if one not in known}))
