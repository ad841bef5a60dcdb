"""A database behind a pooler in transaction mode: ours, and PgBouncer where containers can run."""

from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import NullPool, create_engine

from support.postgres.pgbouncer import pgbouncer
from support.postgres.transaction_pooler import transaction_pooler
from txbox.schema import tables

SERVERS = 2
"""How many the pooler lends to its clients."""


@pytest.fixture(params=["ours", pytest.param("PgBouncer", marks=pytest.mark.containers)])
def pooled_urls(request: pytest.FixtureRequest, make_database: Callable[..., str]) -> Iterator[tuple[str, str]]:
    """A database with our tables, and the same behind a pooler."""
    url = make_database()
    engine = create_engine(url, poolclass=NullPool)
    with engine.begin() as connection:
        tables().metadata.create_all(connection)
    if request.param == "ours":
        with transaction_pooler(url, size=SERVERS) as (_, through):
            yield url, through
    else:
        with pgbouncer(url, size=SERVERS) as through:
            yield url, through
