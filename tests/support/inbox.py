"""What the inbox has left in the database, read without any code under test."""

from sqlalchemy import Connection, Engine


def recorded(engine: Engine) -> list[tuple[str, str]]:
    """What the table holds, read without any code under test."""
    with engine.connect() as connection:
        rows = connection.exec_driver_sql("SELECT subscriber_id, message_id FROM processed_message ORDER BY 1, 2")
        return [(row[0], row[1]) for row in rows]


def lock_timeout(connection: Connection) -> str:
    return str(connection.exec_driver_sql("SHOW lock_timeout").scalar_one())
