"""Questions to Postgres about itself. They need no table of ours."""

from sqlalchemy import Connection

from txbox.errors import InvalidConfiguration
from txbox.postgres.sql_files import SqlFile


class ServerStatements(SqlFile, file="server.sql"):
    backend_pid: str
    named_by_asyncpg: str
    sessions_at_work: str
    row_estimate: str
    lock_timeout: str
    bound_wait: str
    takes_no_writes: str
    no_time_limit: str
    running_transactions: str


SERVER = ServerStatements.load()


def estimate_rows(connection: Connection, table_name: str) -> int:
    """Return Postgres's estimate of a table's rows; ``table_name`` is quoted."""
    return int(connection.exec_driver_sql(SERVER.row_estimate, {"table_name": table_name}).scalar_one())


def refuse_read_only(connection: Connection, what: str) -> None:
    """Raise ``InvalidConfiguration`` if the server takes no writes; ``what`` names what needs a primary."""
    if connection.exec_driver_sql(SERVER.takes_no_writes).scalar_one():
        raise read_only_server(what)


def read_only_server(what: str) -> InvalidConfiguration:
    return InvalidConfiguration(
        "this server takes no writes: it is a standby, or default_transaction_read_only is on; "
        f"{what} needs the URL of the primary"
    )
