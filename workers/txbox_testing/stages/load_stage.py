"""The stage of bulk loads: one dies at a place, and another finishes its work.

Postgres refuses the transaction that reaches the place, and all that reach it later. So it holds what it would hold if
the driver and its executors had been killed before that transaction's COMMIT.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from txbox.postgres.sql_files import SqlFile
from txbox_testing.database import TrialDatabase

KILLED = "this bulk load is killed here, as the test wants it"


class LoadStatements(SqlFile, file="load_stage.sql"):
    make_end: str
    end_at_chunk: str
    end_at_finish: str
    drop_end: str
    unfinished: str


class LoadStage:
    """Runs a bulk load that dies on the way.

    Args:
        load: runs the load: ``load(resume=None)``, where ``resume`` is the run to finish. It returns the report.
        resumes: whether the load that died is resumed. False: it begins anew.

    Attributes:
        report: that of the load that succeeded.
    """

    def __init__(self, load: Callable[..., Any], database: TrialDatabase, *, resumes: bool) -> None:
        self._load = load
        self._database = database
        self._resumes = resumes
        self._statements = LoadStatements.load(database.schema, database.prefix)
        self.report: Any = None

    def settle(self) -> None:
        """Run the load undisturbed."""
        self.report = self._load(resume=None)

    def crash(self, place: str, passes: int) -> bool:
        """Kill the load at a place, and finish it. Return False if it did not get there."""
        try:
            with self._ending(place, passes):
                self.settle()
            return False
        except Exception as error:
            if KILLED not in str(error):
                raise
        found = self._database.driver.execute(self._statements.unfinished).fetchone() if self._resumes else None
        self.report = self._load(resume=found[0] if found else None)
        return True

    @contextmanager
    def _ending(self, place: str, passes: int) -> Iterator[None]:
        with psycopg.ClientCursor(self._database.driver) as cursor:
            cursor.execute(self._statements.make_end, {"text": KILLED})
            try:
                if place == "merging":
                    cursor.execute(self._statements.end_at_chunk, {"passes": passes})
                else:
                    cursor.execute(self._statements.end_at_finish)
                yield
            finally:
                cursor.execute(self._statements.drop_end)
