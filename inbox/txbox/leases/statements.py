"""The statements of ``leases.sql``."""

from txbox.postgres.sql_files import SqlFile


class LeaseStatements(SqlFile, file="leases.sql"):
    acquire: str
    acquire_by_clock: str
    read_timeline: str
    renew: str
    shorten: str
    complete: str
    release: str
    counts: str
