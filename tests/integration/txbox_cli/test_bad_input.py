"""The tour of what goes wrong with servers: each is one line with its remedy, and status 1."""

import re
import socket
import uuid
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import URL, Engine, make_url

from support.program import PASSWORD, Ended
from txbox.postgres import urls

Txbox = Callable[..., Ended]


@pytest.fixture
def place(schema_url: str) -> URL:
    return make_url(schema_url)


def url(place: URL, **changes: object) -> str:
    return place._replace(**changes).render_as_string(hide_password=False)  # type: ignore[arg-type]


DATABASE = [
    ({"password": PASSWORD}, "password authentication failed", "correct the user or the password in the URL"),
    ({"password": None}, "no password supplied", "put the password into the URL"),
    ({"database": "no_such_database"}, 'database "no_such_database" does not exist', "or correct the URL"),
    ({"host": "no-such-host.invalid", "password": PASSWORD}, "no-such-host.invalid", "correct the host in the URL"),
    ({"port": 1, "password": PASSWORD}, "Connection refused", "start the server, or correct host and port in the URL"),
    ({"query": {"colour": "red"}, "password": PASSWORD}, "colour", "correct what follows the ? in the URL"),
    ({"query": {"connect_timeout": "soon"}}, "connect_timeout", "correct what follows the ? in the URL"),
]

COMMANDS = [
    ["status"],
    ["db", "check"],
    ["db", "upgrade"],
    ["db", "downgrade", "--to", "0", "--yes"],
    ["dead-letters", "list"],
    ["dead-letters", "show", "1"],
    ["dead-letters", "redrive", "--all"],
    ["outbox", "sent"],
    ["outbox", "replay"],
    ["relay"],
]


@pytest.mark.parametrize(("changes", "fragment", "remedy"), DATABASE, ids=lambda value: str(value)[:40])
def test_a_database_that_cannot_be_reached(
    changes: dict[str, object], fragment: str, remedy: str, txbox: Txbox, place: URL
) -> None:
    wrong = url(place, **changes)
    txbox("status", "--url", wrong).failed_in_one_line(1, fragment, remedy)
    txbox("status", "--url", wrong, "--debug").failed_with_traceback(1, fragment, remedy)
    txbox("--log-level", "DEBUG", "status", "--url", wrong).said(1, fragment, remedy)


def test_every_command_says_so_alike(txbox: Txbox, place: URL) -> None:
    wrong = url(place, port=1, password=PASSWORD)
    for command in COMMANDS:
        txbox(*command, "--url", wrong).failed_in_one_line(1, "Connection refused", "start the server")


@pytest.fixture
def silent_server() -> Iterator[int]:
    """The port of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_database_that_never_answers(
    txbox: Txbox, place: URL, silent_server: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(urls, "PROGRAM_CONNECT_SECONDS", 1)
    txbox("status", "--url", url(place, port=silent_server)).failed_in_one_line(
        1, "timeout expired", "is the server reachable from here?"
    )


@pytest.mark.parametrize(
    ("command", "table"),
    [
        (["status"], "processed_message"),
        (["dead-letters", "list"], "dead_letter"),
        (["dead-letters", "show", "1"], "dead_letter"),
        (["dead-letters", "redrive", "1"], "dead_letter"),
        (["outbox", "sent"], "outbox_sent"),
        (["outbox", "replay"], "outbox_sent"),
        (["relay"], "outbox_message"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_tables_that_are_not_there(command: list[str], table: str, txbox: Txbox) -> None:
    elsewhere, others = txbox(*command, "--schema", "no where"), txbox(*command, "--prefix", "other_")
    elsewhere.failed_in_one_line(1, table, "does not exist; create ", " with `txbox db upgrade --schema 'no where'`")
    others.failed_in_one_line(
        1, f"other_{table}", "does not exist; create ", " with `txbox db upgrade --prefix other_`"
    )


@pytest.fixture
def stranger(engine: Engine) -> Iterator[str]:
    """A role that may see that the tables exist, and no more."""
    name = f"stranger_{uuid.uuid4().hex[:8]}"
    with engine.begin() as connection:
        schema = connection.exec_driver_sql("SELECT current_schema()").scalar_one()
        connection.exec_driver_sql(f"CREATE ROLE {name} LOGIN PASSWORD '{PASSWORD}'")
        connection.exec_driver_sql(f"GRANT USAGE ON SCHEMA {schema} TO {name}")
    yield name
    with engine.begin() as connection:
        connection.exec_driver_sql(f"DROP OWNED BY {name}")
        connection.exec_driver_sql(f"DROP ROLE {name}")


def test_no_right_to_the_tables(txbox: Txbox, place: URL, stranger: str) -> None:
    theirs = url(place, username=stranger, password=PASSWORD)
    told = r"permission denied for .*grant it to this user|the right to SELECT on (\w+) is lacking; GRANT SELECT ON \1"
    for command in COMMANDS[4:]:
        ended = txbox(*command, "--url", theirs)
        ended.failed_in_one_line(1)
        assert re.search(told, ended.err), (command, ended.err)


@pytest.mark.parametrize(
    ("environment", "queue_url", "fragment"),
    [
        (
            {},
            "{queue}-not",
            "The specified queue does not exist; create the queue, or correct its URL, region or account",
        ),
        ({"AWS_DEFAULT_REGION": None}, "{queue}", "set AWS_DEFAULT_REGION"),
        ({"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}, "{queue}", "set AWS_ACCESS_KEY_ID and"),
        ({"AWS_ENDPOINT_URL": "nonsense"}, "{queue}", "Invalid endpoint: nonsense; correct AWS_ENDPOINT_URL"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, "{queue}", "is it running, and is AWS_ENDPOINT_URL right?"),
        ({"AWS_PROFILE": "nosuch"}, "{queue}", "correct AWS_PROFILE"),
    ],
    ids=["queue", "region", "credentials", "endpoint", "refused", "profile"],
)
def test_a_queue_that_cannot_be_reached(
    environment: dict[str, str | None],
    queue_url: str,
    fragment: str,
    txbox: Txbox,
    queue: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # boto3 must find no other way to what is missing.
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/nowhere")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name, value in environment.items():
        if value is None:
            monkeypatch.delenv(name)
        else:
            monkeypatch.setenv(name, value)
    txbox("status", "--queue", queue_url.format(queue=queue)).failed_in_one_line(1, fragment)
