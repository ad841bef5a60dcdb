"""The sweeper: removes rows in physical order, a stretch of blocks at a time.

Rows of the inbox are inserted in order of time: at first at the table's end, and once deleted rows have been vacuumed,
in the pages they left. So the table is written round and round, and rows that are too old lie behind a cursor::

    block 0                    cursor ─▶                              end
    │ new rows, in freed pages │ too old … too old … │ not too old … │

A window's cursor moves on until it meets rows that are younger than the window, and stays there. It is stored in the
table of maintenance, in the transaction of each delete; another window goes on from there. The cursor never looks back:
if an old snapshot keeps Postgres from cleaning up deleted rows, they are not read again and again.

If no page is free, new rows make the table longer, so its end may be young before its beginning is. Then the cursor
would wait there for a whole window. So there is a begin cursor, at first at the table's beginning. It looks at one
stretch in each round, stays while most rows there are young, and otherwise goes on as the cursor does.

The cursor has passed or cannot reach some rows: those of letters that were waiting then, and rows that an update has
moved. The daily cursor finds them slowly: it goes through the whole table once a day.

In the table of maintenance, the cursors of windows are its ``heads``, their begin cursors its ``probes``, and the daily
cursor is its ``swept``.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from txbox.maintenance.tasks import CursorTask, SweeperStatements, Task
from txbox.maintenance.transactions import STATEMENT_MS, MaintenanceTransactions
from txbox.postgres.sqlstates import QUERY_CANCELED, is_outage, sqlstate
from txbox.status.staging_tables import StagingCatalogue


class StagingSweeper:
    """Drops the staging tables of runs that are finished, forgotten, or abandoned for long enough."""

    def __init__(
        self,
        transactions: MaintenanceTransactions,
        catalogue: StagingCatalogue,
        *,
        window: timedelta | None,
        stopping: Callable[[], bool],
    ) -> None:
        """Store the tables; ``window``: how long an abandoned run keeps its tables; None: for ever."""
        self._transactions = transactions
        self._catalogue = catalogue
        self._window = window
        self._stopping = stopping

    def abandoned(self, connection: Connection) -> list[str]:
        """Return the tables that ``drop_all`` would drop now."""
        return self._catalogue.abandoned(connection, None if self._window is None else self._window.total_seconds())

    def drop_all(self) -> int:
        """Drop the tables and return how many. If one cannot be dropped, drop the others before raising its error."""
        dropped, refused = 0, None
        for table in self._transactions.run(self.abandoned):
            if self._stopping():
                break
            try:
                self._drop(table)
            except DBAPIError as error:
                if is_outage(error):
                    raise
                refused = error
            else:
                dropped += 1
        if refused is not None:
            raise refused
        return dropped

    def _drop(self, table: str) -> None:
        for drop in self._transactions.run(lambda connection: self._catalogue.drops(connection, table)):
            self._transactions.run(partial(Connection.exec_driver_sql, statement=drop))
        self._transactions.run(lambda connection: self._transactions.progress(connection, "staging", 1, {}))
        _log.info("staging: dropped %s", table)


_log = logging.getLogger("txbox.maintenance")


LONGEST_MS = 100
"""Timeout of a statement that looks at several blocks; after it, the next looks at fewer."""

WANTED_MS = 40
"""The next statement looks at more blocks if one takes less than half of this, and at fewer if it takes more."""

MOST_BLOCKS = 64
"""Most blocks per statement: half a megabyte. More would be no quicker, and hold up other commits for longer."""

FIRST_BLOCKS = 16
"""Blocks of the first statement."""

STOP_BLOCKS = 128
"""A cursor stays where this many blocks have young rows and none that is too old."""

FRUITLESS_BLOCKS = 1_024
"""After this many blocks without anything to remove, a cursor pauses until the next round."""

SWEEP_SECONDS = 86_400.0
"""How long the daily cursor takes to go through a table."""

SWEEP_BLOCKS = 64
"""The daily cursor looks at no fewer blocks in a round."""

COUNTED_BLOCKS = 4_096
"""An estimate looks at this many blocks; a table with no more is counted."""

SAMPLES = 64
"""Stretches of an estimate, evenly over the table."""

SAMPLE_STEP_BLOCKS = 512
"""Blocks per statement when all are counted."""


@dataclass(frozen=True, slots=True)
class _Found:
    """What a statement has found in its stretch.

    Attributes:
        removed: rows.
        last_block: the last block of the removed rows.
        fresh: rows that are younger than the cursor's window.
        first_fresh: the first block of the fresh rows.
        removed_behind: rows removed behind the first fresh row.
    """

    removed: int
    last_block: int | None = None
    fresh: int = 0
    first_fresh: int | None = None
    removed_behind: int = 0

    @property
    def young_from(self) -> int | None:
        """The block from which most rows are young; None if there are only some between old ones."""
        return self.first_fresh if self.fresh > self.removed_behind else None


class Sweeper:
    """Removes rows that are too old, in transactions bounded in size and time."""

    def __init__(
        self,
        transactions: MaintenanceTransactions,
        statements: SweeperStatements,
        *,
        rows_per_transaction: int,
        stopping: Callable[[], bool],
    ) -> None:
        """Store the transactions, how many rows each may remove, and the function that says whether to stop."""
        self._transactions = transactions
        self._sql = statements
        self._rows = rows_per_transaction
        self._stopping = stopping
        self._blocks: dict[str, int] = {}

    def sweep_all(self, task: Task) -> int:
        """Go through a whole table that is not large, and return how many rows were removed."""
        total, at, removed = self._count_blocks(task.table), 0, 0
        while at < total and not self._stopping():
            at, found = self._step(task, task.parameters, at, total, lambda _, __: {})
            removed += found.removed
        return removed

    def sweep_with_cursors(self, task: CursorTask, *, until: float, once: bool) -> int:
        """Move a table's cursors, and return how many rows were removed.

        Args:
            task: what to remove.
            until: a time of ``time.monotonic()`` at which to stop, to go on in the next round.
            once: no round follows soon: the daily cursor does a full day's share if it has never been moved.
        """
        detail, seconds = self._transactions.read(task.name)
        swept = int(detail.get("swept", 0))
        total = self._count_blocks(task.table)
        if total == 0:
            return 0
        state: dict[str, Any] = {"swept": swept % total}
        for name in ("heads", "probes"):
            places = detail.get(name, {})
            state[name] = {f"{window:g}": _place_of(window, places) % total for window in task.windows}
        removed = sum(self._move_cursor(task, state, window, total, until) for window in task.windows)
        removed += sum(self._move_begin_cursor(task, state, window, total, until) for window in task.windows)
        since = (SWEEP_SECONDS if once else 0.0) if seconds is None else min(seconds, SWEEP_SECONDS)
        share = min(max(int(total * since / SWEEP_SECONDS), SWEEP_BLOCKS), total)
        return removed + self._move_daily_cursor(task, state, share, total, until)

    def _move_cursor(self, task: CursorTask, state: dict[str, Any], window: float, total: int, until: float) -> int:
        """Move a window's cursor until it meets young rows."""
        key, cursors = f"{window:g}", state["heads"]
        at = start_of_young = cursors[key]
        removed = scanned = fruitless = young = 0
        while scanned < total and not self._is_over(until):
            begin = at

            def next_state(_: _Found, beyond: int) -> Mapping[str, Any]:
                cursors[key] = beyond % total
                return state

            at, found = self._step(task, {**task.parameters, "window": window}, begin, total, next_state)
            moved = at - begin
            scanned, removed = scanned + moved, removed + found.removed
            fruitless = 0 if found.removed else fruitless + moved
            if found.young_from is not None and found.young_from < at:
                start_of_young = start_of_young if young else found.young_from
                young += at - found.young_from
            elif found.removed:
                young = 0
            at %= total
            if young >= min(STOP_BLOCKS, total):
                cursors[key] = start_of_young
                break
            if fruitless >= FRUITLESS_BLOCKS:
                break
        else:
            if young:
                cursors[key] = start_of_young
        return removed

    def _move_begin_cursor(
        self, task: CursorTask, state: dict[str, Any], window: float, total: int, until: float
    ) -> int:
        """Move a window's begin cursor while most rows there are too old."""
        key, begins = f"{window:g}", state["probes"]
        if begins[key] == state["heads"][key]:
            begins[key] = 0
        removed = scanned = 0
        while scanned < total and not self._is_over(until):
            begin = begins[key]

            def next_state(found: _Found, beyond: int, begin: int = begin) -> Mapping[str, Any]:
                if found.young_from is not None and found.young_from < beyond:
                    beyond = found.young_from
                elif not found.removed:
                    beyond = begin
                begins[key] = beyond % total
                return state

            at, found = self._step(task, {**task.parameters, "window": window}, begin, total, next_state)
            scanned, removed = scanned + at - begin, removed + found.removed
            if begins[key] != at % total:
                break
        return removed

    def _move_daily_cursor(self, task: CursorTask, state: dict[str, Any], share: int, total: int, until: float) -> int:
        """Move the daily cursor by ``share`` blocks; the shortest window's cursor follows it to old stretches."""
        window = min(task.windows)
        removed = scanned = 0
        while scanned < share and not self._is_over(until):
            begin = state["swept"]

            def next_state(found: _Found, beyond: int, begin: int = begin) -> Mapping[str, Any]:
                state["swept"] = beyond % total
                if found.removed > found.fresh:
                    state["heads"][f"{window:g}"] = begin
                return state

            parameters = {**task.parameters, "window": window}
            end = min(begin + share - scanned, total)
            at, found = self._step(task, parameters, begin, end, next_state)
            scanned, removed = scanned + at - begin, removed + found.removed
        self._transactions.run(lambda connection: self._transactions.progress(connection, task.name, 0, state))
        return removed

    def _step(
        self,
        task: Task,
        parameters: Mapping[str, Any],
        at: int,
        end: int,
        next_state: Callable[[_Found, int], Mapping[str, Any]],
    ) -> tuple[int, _Found]:
        """Look at the next stretch in one transaction; return where to go on, and what was found.

        Stay in the stretch if it had more rows than one transaction may remove.
        """
        while True:
            blocks = self._blocks.get(task.name, FIRST_BLOCKS)
            beyond = min(at + blocks, end)
            places = {"first": f"({at},0)", "beyond": f"({beyond},0)", "rows": self._rows}
            took = 0.0

            def work(
                connection: Connection, beyond: int = beyond, places: Mapping[str, Any] = places
            ) -> tuple[int, _Found]:
                nonlocal took
                began = time.monotonic()
                result = connection.exec_driver_sql(task.forget, {**parameters, **places})
                found = _Found(*result.one()) if result.returns_rows else _Found(result.rowcount)
                took = (time.monotonic() - began) * 1000
                goes_on_at = beyond
                if found.removed >= self._rows:
                    goes_on_at = at if found.last_block is None else found.last_block
                detail = next_state(found, goes_on_at)
                if found.removed or detail:
                    self._transactions.progress(connection, task.name, found.removed, detail)
                return goes_on_at, found

            try:
                result = self._transactions.run(work, statement_ms=LONGEST_MS if blocks > 1 else STATEMENT_MS)
            except DBAPIError as error:
                if sqlstate(error) != QUERY_CANCELED or blocks == 1:
                    raise
                self._blocks[task.name] = max(blocks // 4, 1)
                continue
            if took > WANTED_MS:
                self._blocks[task.name] = max(blocks // 2, 1)
            elif took < WANTED_MS / 2 and beyond - at == blocks:
                self._blocks[task.name] = min(blocks * 2, MOST_BLOCKS)
            return result

    def _count_blocks(self, table: str) -> int:
        return self._transactions.run(
            lambda connection: int(connection.exec_driver_sql(self._sql.blocks, {"name": table}).scalar_one())
        )

    def _is_over(self, until: float) -> bool:
        return self._stopping() or time.monotonic() >= until


def _place_of(window: float, places: Mapping[str, int]) -> int:
    """Return where a window's cursor is; a new window starts at the cursor of the window closest in length."""
    return int(places[min(places, key=lambda key: abs(float(key) - window))]) if places else 0


def estimate(connection: Connection, task: Task, sql: SweeperStatements) -> tuple[int, bool]:
    """Return how many rows a task would remove, and whether they were counted; a large table is sampled."""
    total = int(connection.exec_driver_sql(sql.blocks, {"name": task.table}).scalar_one())
    is_counted = total <= COUNTED_BLOCKS
    step = SAMPLE_STEP_BLOCKS if is_counted else total // SAMPLES
    blocks = SAMPLE_STEP_BLOCKS if is_counted else COUNTED_BLOCKS // SAMPLES
    rows = looked_at = 0
    for first in range(0, total, step):
        places = {"first": f"({first},0)", "beyond": f"({min(first + blocks, total)},0)"}
        rows += int(connection.exec_driver_sql(task.count, {**task.parameters, **places}).scalar_one())
        looked_at += min(blocks, total - first)
    return (rows, True) if is_counted else (round(rows * total / looked_at), False)
