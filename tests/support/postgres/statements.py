"""What goes to the server, and statements of the test's own."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import psycopg
from sqlalchemy import Engine, event


@contextmanager
def statements_sent(engine: Engine) -> Iterator[list[str]]:
    """Collect everything that goes to the server, transaction control included."""
    sent: list[str] = []

    def on_execute(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        sent.append(statement)

    def on(what: str) -> Callable[..., None]:
        return lambda *_: sent.append(what)

    listeners: list[tuple[str, Callable[..., None]]] = [
        ("before_cursor_execute", on_execute),
        *((name, on(name.upper())) for name in ("commit", "rollback", "savepoint")),
    ]
    for name, listener in listeners:
        event.listen(engine, name, listener)
    try:
        yield sent
    finally:
        for name, listener in listeners:
            event.remove(engine, name, listener)


@contextmanager
def bytes_fetched(engine: Engine | type[Engine]) -> Iterator[list[int]]:
    """Collect how many bytes of values each statement has brought from the server, as they were sent."""
    fetched: list[int] = []

    def on_result(_connection: object, cursor: psycopg.Cursor[Any], *_: object) -> None:
        found = cursor.pgresult
        places = product(range(found.ntuples), range(found.nfields)) if found else ()
        fetched.append(sum(len(found.get_value(*place) or b"") for place in places if found))

    event.listen(engine, "after_cursor_execute", on_result)
    try:
        yield fetched
    finally:
        event.remove(engine, "after_cursor_execute", on_result)


def run(engine: Engine, statement: str, parameters: tuple[Any, ...] = ()) -> None:
    """Run a statement, and commit it."""
    with engine.begin() as connection:
        connection.exec_driver_sql(statement, parameters)
