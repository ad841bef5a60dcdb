"""Each test has Django on the schema of its own."""

from collections.abc import Iterator

import pytest
from django.db import connections
from sqlalchemy import Engine

from conftest import dispose
from support.django_shop import project
from txbox_django import database_engine


@pytest.fixture
def django(schema_url: str) -> Iterator[None]:
    project.use(schema_url)
    project.make_tables()
    yield
    connections.close_all()


@pytest.fixture
def lendable(django: None) -> Iterator[Engine]:
    """An engine of Django's connections."""
    engine = database_engine(pool_size=4)
    yield engine
    dispose(engine)
