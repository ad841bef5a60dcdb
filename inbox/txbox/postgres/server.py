"""Questions to Postgres about itself."""

from txbox.postgres.sql_files import SqlFile

__all__ = ["SERVER", "ServerStatements"]


class ServerStatements(SqlFile, file="server.sql"):
    """The statements of ``server.sql``, which need no table of ours."""

    backend_pid: str
    sessions_at_work: str
    blocked_loads: str
    bound_wait: str


SERVER = ServerStatements.load()
