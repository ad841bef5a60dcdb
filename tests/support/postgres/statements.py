"""What goes to the server, and statements of the test's own."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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


def run(engine: Engine, statement: str, parameters: tuple[Any, ...] = ()) -> None:
    """Run a statement, and commit it."""
    with engine.begin() as connection:
        connection.exec_driver_sql(statement, parameters)
