"""Run a bulk load that dies on the way, or try one at every place where it may die.

Postgres refuses the transaction that reaches the place, and all that reach it later. So it holds what it would hold if
the driver and its executors had been killed before that transaction's COMMIT.
"""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from sqlalchemy import Engine

from txbox import InvalidConfiguration
from txbox.postgres.sql_files import SqlFile
from txbox_testing.comparison import State, unlike, values_of
from txbox_testing.database import TrialDatabase
from txbox_testing.faults import Fault, crash_at
from txbox_testing.stages.stage import quiet
from txbox_testing.trial import PointResult, TrialReport, verdict

Load = Callable[..., Any]

MOST_CHUNKS = 5
"""The most chunks of a load at which it is killed; later ones are left out."""

KILLED = "this bulk load is killed here, as the test wants it"


def load(
    load: Load,
    *,
    engine: Engine,
    fault: Fault | None = None,
    resumes: bool = True,
    schema: str | None = None,
    prefix: str = "",
) -> Any:
    """Run a bulk load that dies on the way, and have it finished.

    ::

        def purchases(resume=None):
            return bulk_load_files(spark, "purchases/", url=url, apply=APPLY, resume=resume, …)

        report = load(purchases, engine=engine, fault=crash_at("merging", 2))

    Args:
        load: runs the load, with Spark. Its ``resume`` is a run to finish, or None.
        engine: the database, with txbox's tables, as a user who may create triggers on them.
        fault: ``crash_at("merging", n)``, ``crash_at("merged")``, or None for no fault.
        resumes: whether the load that died is resumed. False: it begins anew.
        schema: the schema of txbox's tables; None leaves it to the search path.
        prefix: what the tables' names start with.

    Returns:
        The report of the load that succeeded.

    Raises:
        InvalidConfiguration: the fault cannot happen to a load, or could not happen to this one.
    """
    if fault is not None and fault.of != "load":
        raise InvalidConfiguration(
            f'{fault.name} cannot befall a bulk load; crash_at("merging") and crash_at("merged") can'
        )
    with quiet(), TrialDatabase(engine, schema, prefix) as database:
        stage = LoadStage(load, database, resumes=resumes)
        if fault is None:
            stage.settle()
        elif not fault.run(stage):
            raise InvalidConfiguration(f"{fault.name} could not happen: the load was finished without it")
        return stage.report


def try_every_point_of_load(
    load: Load, *, engine: Engine, ignore: Collection[str] = (), schema: str | None = None, prefix: str = ""
) -> TrialReport:
    """Try a bulk load at every place where it may die, resumed and begun anew: each must lead to the same state.

    It runs undisturbed, twice from the same rows, and then with each fault. Tables are compared and restored as by
    ``try_every_point``.

    Args:
        load: as for ``load``.
        engine: the database, with txbox's tables and all that the load needs; as for ``try_every_point``.
        ignore: further columns to leave out, as ``table.column``.
        schema: the schema of txbox's tables; None leaves it to the search path.
        prefix: what the tables' names start with.

    Returns:
        What each fault led to; all led to the same state.

    Raises:
        NotIdempotent: some led to another state. It says which, and what differs.
        ValueError: two undisturbed loads lead to different states.
        InvalidConfiguration: the tables cannot be restored.
    """
    begun = time.monotonic()
    with quiet(), TrialDatabase(engine, schema, prefix) as database:

        def run(play: Callable[[LoadStage], object], *, resumes: bool = False) -> tuple[LoadStage, State, bool]:
            database.restore()
            stage = LoadStage(load, database, resumes=resumes)
            happened = play(stage) is not False
            return stage, database.read(), happened

        try:
            before = database.read()
            stage, expected, _ = run(LoadStage.settle)
            _, again, _ = run(LoadStage.settle)
            ignored = database.left_out(expected, again, ignore)
            if unequal := unlike(before, expected, again, ignored) + values_of(expected, again, ignored):
                raise ValueError(
                    f"two undisturbed loads from the same rows lead to different states: {'; '.join(unequal)}. Leave "
                    'out a column whose values have to differ with ignore=("table.column",).'
                )
            chunks = range(1, min(stage.report.chunks, MOST_CHUNKS) + 1)
            points = []
            for fault in (*(crash_at("merging", number) for number in chunks), crash_at("merged")):
                for resumes in (True, False):
                    _, found, happened = run(fault.run, resumes=resumes)
                    how = "resumed" if resumes else "begun anew"
                    unequal = unlike(before, expected, found, ignored)
                    points.append(
                        PointResult(f"{fault.name}, {how}", f"{fault.title}, and {how}", happened, tuple(unequal), ())
                    )
        finally:
            database.restore()
    name = getattr(load, "__name__", type(load).__name__)
    return verdict(name, points, ignored, begun, of_load=True)


class LoadStatements(SqlFile, file="load_run.sql"):
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
