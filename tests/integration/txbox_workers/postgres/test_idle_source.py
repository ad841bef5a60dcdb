"""A source that nobody asks: its worker is paused, or its handlers are slow."""

from sqlalchemy import Engine, create_engine

from support.txbox.outbox import publish
from support.waiting import wait_until
from txbox import Outgoing
from txbox_workers.postgres import PostgresSource

LISTENS = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'idle' AND starts_with(query, 'LISTEN')"


def test_it_does_not_listen_and_finds_later_what_came_meanwhile(engine: Engine, schema_url: str) -> None:
    """The server keeps each notification until all who listen have read it, and refuses NOTIFY once it has too many."""

    def listens() -> bool:
        with engine.connect() as connection:
            return bool(connection.exec_driver_sql(LISTENS).scalar_one())

    host = create_engine(schema_url, connect_args={"application_name": "idle"})
    source = PostgresSource(host, "billing")
    source.receive()
    assert listens()
    wait_until(lambda: not listens(), "the connections are closed")
    publish(engine, Outgoing("inbox:billing", "1"))
    found: list[object] = []

    def receive() -> bool:
        found.extend(source.receive())
        return bool(found)

    wait_until(receive, "a delivery")
    assert listens()
    source.close()
    host.dispose()
