"""Do a bulk load that dies on the way, or try one at every place where it may die."""

import time
from collections.abc import Callable, Collection
from typing import Any

from sqlalchemy import Engine

from txbox import InvalidConfiguration
from txbox_testing.comparison import State, unlike, values_of
from txbox_testing.database import TrialDatabase
from txbox_testing.faults import Fault, crash_at
from txbox_testing.stages.load_stage import LoadStage
from txbox_testing.stages.stage import quiet
from txbox_testing.trial import NotIdempotent, PointResult, TrialReport

Load = Callable[..., Any]

MOST_CHUNKS = 5
"""Of a load, at which it dies; those after them are left out."""


def load(
    load: Load,
    *,
    engine: Engine,
    fault: Fault | None = None,
    resumes: bool = True,
    schema: str | None = None,
    prefix: str = "",
) -> Any:
    """Do a bulk load that dies on the way, and have it finished.

    ::

        def purchases(resume=None):
            return bulk_load_files(spark, "purchases/", url=url, apply=APPLY, resume=resume, …)

        report = load(purchases, engine=engine, fault=crash_at("merging", 2))

    Args:
        load: does the load, with Spark; its ``resume`` is a run to finish, or None.
        engine: the database, with txbox's tables, of a user who may make triggers on them.
        fault: ``crash_at("merging", n)``, ``crash_at("merged")``, or None: nothing befalls it.
        resumes: whether what died is resumed; False: the load is begun anew.
        schema: the schema of txbox's tables; None: the search path.
        prefix: of their names.

    Returns:
        The report of the load that has ended well.

    Raises:
        InvalidConfiguration: the fault cannot befall a load, or could not happen to this one.
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
    """Try a bulk load at every place where it may die, resumed and begun anew: none may lead to another state.

    It is done undisturbed, twice from the same rows, and then with each fault. Tables are compared, and brought back,
    as ``try_every_point`` does it.

    Args:
        load: as for ``load``.
        engine: the database, with txbox's tables, and all that the load needs; as for ``try_every_point``.
        ignore: columns that are left out, too, as ``table.column``.
        schema: the schema of txbox's tables; None: the search path.
        prefix: of their names.

    Returns:
        What each fault has led to; all of them to the same state.

    Raises:
        NotIdempotent: some have led to another state; it says which, and what differs.
        ValueError: two undisturbed loads lead to different states.
        InvalidConfiguration: the tables cannot be brought back.
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
    left_out = tuple(f"{table}.{column}" for table, columns in ignored.items() for column in sorted(columns))
    report = TrialReport(name, tuple(points), left_out, time.monotonic() - begun, of_load=True)
    if not report.ok:
        raise NotIdempotent(report)
    return report
