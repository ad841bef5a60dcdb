"""Transactions that do not outlive their invocation.

Lambda ends a process, or stops it for good, without a word to Postgres: where the connection is not closed with it, the
server waits for a client that will never come back, and the transaction keeps its locks: those on the inbox's rows
first of all, which every redelivery then runs into::

    invocation    BEGIN ── record m1 ── handler … time-out, the sandbox is gone
    Postgres      ├──────── m1 is locked ────────────────────────────────────── until TCP notices, hours later
    redelivery                                          record m1: in flight … in flight … the queue's dead letters

So each transaction tells the server when the invocation ends, and the server ends what is then still open.
"""

from sqlalchemy import Connection, Engine, event

from txbox.ledgers.lease import elapsed
from txbox_workers.aws_lambda.deadline import Deadline
from txbox_workers.aws_lambda.statements import LIMIT_TRANSACTION, LIMITS
from txbox_workers.outages import bookkeeping

__all__ = ["limited"]


def limited(engine: Engine, deadline: Deadline) -> Engine:
    """Return a copy of an engine, with the same pool, whose transactions end with the invocation.

    A copy, because the host's other connections must not hear our event listener.
    """
    copy = engine.execution_options()

    def limit(connection: Connection) -> None:
        ends_at = deadline.ends_at()
        if ends_at is not None:
            _limit(connection, max(round((ends_at - elapsed()) * 1000), 1))

    event.listen(copy, "begin", limit)
    return copy


def _limit(connection: Connection, milliseconds: int) -> None:
    """Tell the server how long the transaction may take that begins now: one round trip, for an event's messages.

    It is also the first to meet a connection that has died meanwhile, before any handler has run; SQLAlchemy gives up
    the other connections of the pool then, as they have most likely gone the same way.

    Raises:
        DatabaseUnavailable: there is no server at the other end, or it refuses.
    """
    with bookkeeping():
        connection.exec_driver_sql(LIMIT_TRANSACTION, (str(milliseconds), LIMITS, milliseconds))
