"""Ending COPYs whose client is frozen.

While a server process reads a COPY, no time-out of Postgres reaches it: neither that of idle transactions nor that of
statements, and a client that stands still has not closed its socket. So a task that is frozen within its COPY keeps its
chunk, and whoever runs the chunk again waits for it::

    task, frozen       claims chunk 17 ── COPY ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ended
    task, run again        claims chunk 17: waits ── stalled_seconds ── ChunkHeld ── looks ──┴── another attempt

A COPY is frozen if it has begun before the wait, waits for its client, and has received nothing for ``FROZEN_SECONDS``
more. To end one that is only slow does no harm but to its time: nothing of it is committed.
"""

import logging
import time

from sqlalchemy import Engine

from txbox.postgres.transactions import short_transaction
from txbox.status.blocked_loads import run_lock
from txbox_spark.merging.merge_plan import MergePlan

FROZEN_SECONDS = 30.0
"""How long a COPY must have received nothing; at most ``stalled_seconds``."""


def end_frozen_copies(engine: Engine, plan: MergePlan) -> int:
    """End the sessions of a run that are frozen within a COPY, and return how many."""
    before = _copies(engine, plan)
    if not before:
        return 0
    time.sleep(min(FROZEN_SECONDS, plan.stalled_seconds))
    # A process id may be another session's by then, which is then in a COPY of the same run, and has received less.
    frozen = sorted(pid for pid, received in _copies(engine, plan).items() if before.get(pid) == received)
    with short_transaction(engine) as connection:
        for pid in frozen:
            connection.exec_driver_sql(plan.sql.end_session, {"pid": pid})
    if frozen:
        _log.warning("bulk load %s: ended COPYs whose client is frozen, by server processes %s", plan.run_id, frozen)
    return len(frozen)


def _copies(engine: Engine, plan: MergePlan) -> dict[int, int]:
    """Return server processes of the run that wait for more of a COPY, and how many bytes each has received."""
    values = {"run_lock": run_lock(plan.run_id), "stalled": plan.stalled}
    with short_transaction(engine) as connection:
        return {row.pid: row.received for row in connection.exec_driver_sql(plan.sql.waiting_copies, values)}


_log = logging.getLogger("txbox.spark")
