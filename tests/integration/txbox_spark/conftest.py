"""What the tests of bulk loads share."""

import pytest
from sqlalchemy import Engine

from support.bulk_loads import Books


@pytest.fixture
def books(engine: Engine) -> Books:
    """The business tables."""
    return Books(engine)
