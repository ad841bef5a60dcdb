"""The stage of bulk loads: one dies at a place, and another one finishes its work.

Postgres refuses the transaction that comes to the place, and all that come there later. So it has then what it would
have if the driver and its executors had been killed before the COMMIT of that transaction.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from txbox.postgres.sql_files import SqlFile
from txbox_testing.database import TrialDatabase

KILLED = "this bulk load is killed here, as the test wants it"


class LoadStatements(SqlFile, file="load_stage.sql"):
    """The statements of ``load_stage.sql``."""

    make_end: str
    end_at_chunk: str
    end_at_finish: str
    drop_end: str
    unfinished: str


class LoadStage:
    """Has a bulk load done that dies on the way.

    Args:
        load: does it: ``load(resume=None)``, where ``resume`` is the run to finish; it returns the report.
        database: seen by the trial.
        resumes: whether what died is resumed; False: the load is begun anew.

    Attributes:
        report: of the load that has ended well.
    """

    def __init__(self, load: Callable[..., Any], database: TrialDatabase, *, resumes: bool) -> None:
        self._load = load
        self._database = database
        self._resumes = resumes
        self._statements = LoadStatements.load(database.schema, database.prefix)
        self.report: Any = None

    def settle(self) -> None:
        """Do the load undisturbed."""
        self.report = self._load(resume=None)

    def crash(self, place: str, passes: int) -> bool:
        """Have the load die at a place, and finish it; return False if it did not come there."""
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
