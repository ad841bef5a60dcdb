"""Each test has Django on the schema of its own."""

from collections.abc import Iterator

import pytest
from django.db import connections

from support.django_shop import project


@pytest.fixture
def django(schema_url: str) -> Iterator[None]:
    project.use(schema_url)
    project.make_tables()
    yield
    connections.close_all()
