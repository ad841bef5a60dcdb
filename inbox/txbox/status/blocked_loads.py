"""Which bulk loads wait for a lock, and who holds it.

Each transaction of a bulk load also takes a shared advisory lock whose number is the run's. It blocks no session. It
lets any session, whatever its role may see, find in ``pg_locks`` to which run a server process belongs.
"""

from dataclasses import dataclass

from sqlalchemy import Connection

from txbox.postgres.sql_files import SqlFile


class BlockedLoadStatements(SqlFile, file="blocked_loads.sql"):
    blocked_loads: str


_TAG = 0x7478
"""The upper 16 bits of such a lock's number; the run is the other 48."""


@dataclass(frozen=True, slots=True)
class BlockedLoad:
    """A transaction of a bulk load that waits for a lock.

    Attributes:
        run_id: of the load.
        pid: its server process.
        seconds: how long it has waited; None if this role may not see that.
        blocker_pid: the server process it waits for; 0 is a prepared transaction.
        blocker_run_id: the bulk load of the blocker; None if it is something else.
        blocker_owner: the blocker's user; None if there is none.
        blocker_state: state of the blocker's session, such as ``idle in transaction``; None if this role may not see
            it.
        blocker_seconds: how long the blocker's transaction has been open; None if this role may not see that.
    """

    run_id: str
    pid: int
    seconds: float | None
    blocker_pid: int
    blocker_run_id: str | None
    blocker_owner: str | None
    blocker_state: str | None
    blocker_seconds: float | None

    @property
    def usual(self) -> bool:
        """Whether it only waits its turn: another chunk of the same run is applying its events."""
        return self.run_id == self.blocker_run_id and not (self.blocker_state or "").startswith("idle")

    def __str__(self) -> str:
        facts = [
            f"bulk load {self.blocker_run_id}" if self.blocker_run_id else None,
            f"of {self.blocker_owner}" if self.blocker_owner else None,
            self.blocker_state,
            None if self.blocker_seconds is None else f"its transaction open for {self.blocker_seconds:.0f} s",
        ]
        details = ", ".join(one for one in facts if one)
        waited = "" if self.seconds is None else f" for {self.seconds:.0f} s"
        blocker = f"server process {self.blocker_pid}" if self.blocker_pid else "a prepared transaction"
        remedy = (
            f"to end it: SELECT pg_terminate_backend({self.blocker_pid})"
            if self.blocker_pid
            else "to end it: COMMIT PREPARED or ROLLBACK PREPARED (pg_prepared_xacts has its name)"
        )
        return (
            f"bulk load {self.run_id} (server process {self.pid}) has waited{waited} for {blocker}"
            f"{f' ({details})' if details else ''}; {remedy}"
        )


def run_lock(run_id: str) -> int:
    """Return the number of the lock that the transactions of a run (12 hexadecimal digits) share."""
    return _TAG << 48 | int(run_id, 16)


def find_blocked_loads(connection: Connection, run_id: str | None = None) -> tuple[BlockedLoad, ...]:
    """Return the bulk loads' transactions in this database that wait for a lock, once per transaction they wait for.

    ``run_id``: only those of this load; None: of all loads.
    """
    statement = BlockedLoadStatements.load().blocked_loads
    rows = connection.exec_driver_sql(statement, {"tag": _TAG, "run_id": run_id}).mappings()
    return tuple(BlockedLoad(**row) for row in rows)
