"""Each test here runs once in each style: over SQLAlchemy and psycopg itself, sync and async, psycopg and asyncpg."""

import pytest

from support.txbox.styles import STYLES, AsyncpgConnections, Style


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=list(STYLES))
def style(request: pytest.FixtureRequest, schema_url: str) -> Style:
    return STYLES[request.param](schema_url)


@pytest.fixture(params=[name for name, style in STYLES.items() if style.has_mapped_classes])
def mapped(request: pytest.FixtureRequest, schema_url: str) -> Style:
    """A style of SQLAlchemy's."""
    return STYLES[request.param](schema_url)


@pytest.fixture(params=[name for name, style in STYLES.items() if not issubclass(style, AsyncpgConnections)])
def of_psycopg(request: pytest.FixtureRequest, schema_url: str) -> Style:
    """A style over psycopg, sync or async."""
    return STYLES[request.param](schema_url)
