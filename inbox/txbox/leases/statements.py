"""The statements of ``leases.sql``."""

from txbox.postgres.sql_files import SqlFile


class LeaseStatements(SqlFile, file="leases.sql"):
    """The statements for the leases in one schema, under one prefix."""

    acquire: str
    acquire_by_clock: str
    read_timeline: str
    renew: str
    shorten: str
    complete: str
    release: str
    counts: str
