"""Which database URLs are read, and what is said of the others."""

import pytest
from sqlalchemy import make_url

from txbox import InvalidConfiguration
from txbox.postgres.urls import database_url


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg"])
def test_three_schemes_mean_one_driver(scheme: str) -> None:
    read = database_url(f"{scheme}://u:p%40ss@host:5433/shop?connect_timeout=5")
    assert read == make_url("postgresql+psycopg://u:p%40ss@host:5433/shop?connect_timeout=5")
    assert database_url(read) == read


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("postgresql+psycopg2://u:hunter2@host/x", r"postgresql\+psycopg2:// cannot be used.*give postgresql://"),
        ("postgresql+asyncpg://u:hunter2@host/x", r"postgresql\+asyncpg:// cannot be used.*give postgresql://"),
        ("mysql://u:hunter2@host/x", "mysql:// cannot be used.*give postgresql://"),
        ("sqlite://", "sqlite:// cannot be used"),
        ("127.0.0.1", "not a database URL; give postgresql://"),
        ("", "not a database URL"),
        ("postgresql://u:hunter2@host:port/x", "not a database URL"),
        ("postgresql://u:p@hunter2@host@other/x", "write it as %40"),
    ],
)
def test_what_cannot_be_used_is_refused_with_a_remedy_and_no_password(url: str, said: str) -> None:
    with pytest.raises(InvalidConfiguration, match=said) as refused:
        database_url(url)
    assert "hunter2" not in str(refused.value)
