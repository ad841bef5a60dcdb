"""The chosen image works with testcontainers as it comes: ready when told so, closed without the password."""

import os
import sys
from collections.abc import Iterator

import psycopg
import pytest
from testcontainers.community.postgres import PostgresContainer

EMBEDDED_MAJOR = 18
IMAGE = os.environ.get("TXBOX_TEST_POSTGRES_IMAGE")

pytestmark = pytest.mark.containers


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresContainer]:
    """A server with a user, a password and a database of which each differs from the others."""
    if not IMAGE:
        pytest.fail("TXBOX_TEST_POSTGRES_IMAGE names no image: run `make test-containers`, which chooses one")
    with PostgresContainer(IMAGE, username="owner", password="pass'word/%", dbname="ledger", driver=None) as container:
        yield container


def connect(server: PostgresContainer, **changed: str) -> psycopg.Connection:
    return psycopg.connect(
        host=server.get_container_host_ip(),
        port=server.get_exposed_port(5432),
        **{"user": "owner", "password": server.password, "dbname": "ledger", **changed},
    )


def test_answers_with_its_version(server: PostgresContainer, capsys: pytest.CaptureFixture[str]) -> None:
    with connect(server) as connection:
        row = connection.execute("select version(), current_database(), current_user").fetchone()
        major = connection.info.server_version // 10_000
    assert row is not None
    version, database, user = row
    assert (database, user) == ("ledger", "owner")
    assert version.startswith(f"PostgreSQL {major}")
    if "txbox-test-postgres" in (IMAGE or ""):
        assert major != EMBEDDED_MAJOR, "this suite is there to show another major version than the embedded one"
    with capsys.disabled():
        sys.stdout.write(f"\n{IMAGE}: PostgreSQL {major}\n")


def test_connection_url_leads_to_the_database(server: PostgresContainer) -> None:
    with psycopg.connect(server.get_connection_url()) as connection:
        assert connection.execute("select current_database()").fetchone() == ("ledger",)


@pytest.mark.parametrize("password", ["", "wrong"])
def test_needs_the_password(server: PostgresContainer, password: str) -> None:
    with pytest.raises(psycopg.OperationalError, match="password"):
        connect(server, password=password)


def test_text_is_utf8(server: PostgresContainer) -> None:
    with connect(server) as connection:
        row = connection.execute("select current_setting('server_encoding'), 'é'::text").fetchone()
    assert row == ("UTF8", "é")
