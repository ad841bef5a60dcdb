"""Checks the id of an event: a column, or an expression over columns, that yields the same id at every read.

Spark knows whether an expression yields another value each time, as ``uuid()`` and ``rand()`` do. Such an expression
may be far below the rows that a load is given, behind a filter or a shuffle. So we follow the plan from the id down to
the files. We also follow what is cached, because the cache is lost with the session.

Rows may be chosen at random, by a sample, a filter or a sort, and columns other than the id may change. Spark considers
the current time stable, and a Python function unless it is declared ``asNondeterministic()``. We cannot see what made
the rows of an RDD or a checkpoint.
"""

from collections.abc import Iterable, Iterator
from functools import reduce
from typing import Any

from txbox import InvalidConfiguration
from txbox_spark.reading.columns import quoted
from txbox_spark.runtime.jobs import changed_settings
from txbox_spark.runtime.lazy_imports import Column, DataFrame, DataType, sql, types


def message_identity(frame: DataFrame, message_id: str) -> tuple[Column, str | None]:
    """Return the id's expression, and the name of the text column that is the id; None if no column is.

    Args:
        frame: the events.
        message_id: a column, or a Spark SQL expression over columns.

    Raises:
        InvalidConfiguration: it is neither, or its values cannot be ids.
    """
    from pyspark.errors import AnalysisException, ParseException

    identity = sql.col(quoted(message_id)) if message_id in frame.columns else sql.expr(message_id)
    try:
        # Select the other columns, too, as the load will: beside them, an aggregate is an error.
        type_ = frame.select(identity, "*").schema.fields[0].dataType
    except (AnalysisException, ParseException) as error:
        what = str(error).splitlines()[0]
        raise InvalidConfiguration(
            f"message_id {message_id!r} is neither a column of the events ({', '.join(frame.columns[:20])}) "
            f"nor an expression over them: {what}"
        ) from error
    refuse_type(message_id, type_)
    plan = _optimized(frame.select(identity))
    if _changes(plan, plan.outputSet()):
        raise InvalidConfiguration(
            f"message_id {message_id!r} may be another one each time that it is asked for; an id must be the same when "
            "the event is read again (in place of input_file_name(), take _metadata.file_path)"
        )
    _refuse_the_same_id_for_all(plan, message_id)
    return identity, message_id if message_id in frame.columns and isinstance(type_, types.StringType) else None


def refuse_type(message_id: str, type_: DataType) -> None:
    """Raise ``InvalidConfiguration`` if values of this type cannot be ids, as ``message_id`` names them."""
    if isinstance(type_, types.FloatType | types.DoubleType) or (
        isinstance(type_, types.DecimalType) and type_.scale != 0
    ):
        raise InvalidConfiguration(
            f"message_id {message_id!r} is of type {type_.simpleString()}, in which the id 1 may become 1.0; an id is "
            "text or a whole number, as the live workers record it: name its type text where the events are read "
            "(--fields, schema), or make it whole, CAST(… AS bigint)"
        )
    if not isinstance(type_, types.StringType | types.IntegralType | types.DecimalType | types.DateType):
        raise InvalidConfiguration(
            f"message_id {message_id!r} is of type {type_.simpleString()}; an id is text or a whole number, as the "
            "live workers record it: cast it"
        )


def _optimized(frame: DataFrame) -> Any:
    """Return Spark's optimized plan, without unused columns and without cached data."""
    execution: Any = frame._jdf.queryExecution()  # noqa: SLF001 - pyspark has no other way to its plan
    theirs = frame.sparkSession.conf.get(_EXCLUDED, None)
    # This rule would run uuid() for rows that are literals in the query, and replace it with its values.
    rules = ",".join(filter(None, (theirs, _EVALUATES)))
    with changed_settings(frame.sparkSession, {_EXCLUDED: rules}):
        return execution.sparkSession().sessionState().optimizer().execute(execution.analyzed().clone())


def _changes(plan: Any, wanted: Any) -> bool:
    """Return whether one of a plan's ``wanted`` columns comes from an expression that yields another value each time.

    ``plan`` is Spark's ``LogicalPlan``, and ``wanted`` an ``AttributeSet``.
    """
    if wanted.isEmpty():
        return False
    children = list(_each(plan.children()))
    if plan.nodeName() == "Union":  # columns correspond by position
        places = [place for place, column in enumerate(_each(plan.output())) if wanted.contains(column)]
        return any(_changes(child, _used_by([child.output().apply(one) for one in places])) for child in children)
    if _without(wanted, plan.inputSet()).isEmpty():  # this node makes none of them
        return any(_changes(child, wanted.intersect(child.outputSet())) for child in children)
    if plan.nodeName() in ("Project", "Aggregate"):
        each = plan.projectList() if plan.nodeName() == "Project" else plan.aggregateExpressions()
        makers = [one for one in _each(each) if wanted.contains(one.toAttribute())]
        below = [(child, _used_by(makers)) for child in children]
    else:  # this node may make its columns from all of its input
        makers = list(_each(plan.expressions()))
        below = [(child, child.outputSet()) for child in children]
    return not all(one.deterministic() for one in makers) or any(_changes(*one) for one in below)


def _used_by(expressions: Iterable[Any]) -> Any:
    """Return the columns that the expressions name; there must be at least one expression."""
    return reduce(lambda some, more: getattr(some, "$plus$plus")(more), (one.references() for one in expressions))


def _without(columns: Any, others: Any) -> Any:
    return getattr(columns, "$minus$minus")(others)


def _each(found: Any) -> Iterator[Any]:
    """Yield the elements of a Scala sequence."""
    return (found.apply(number) for number in range(found.size()))


def _refuse_the_same_id_for_all(plan: Any, message_id: str) -> None:
    """Raise if the id is a constant, such as 'x' or current_date(): all events but one would be duplicates."""
    rows = plan.maxRows()
    if plan.nodeName() == "Project" and plan.references().isEmpty() and (rows.isEmpty() or rows.get() > 1):
        raise InvalidConfiguration(
            f"message_id {message_id!r} is the same for every event, so that all but one would be duplicates; name a "
            "column that tells events apart, or an expression over such columns"
        )


_EXCLUDED = "spark.sql.optimizer.excludedRules"
_EVALUATES = "org.apache.spark.sql.catalyst.optimizer.ConvertToLocalRelation"
