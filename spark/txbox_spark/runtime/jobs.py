"""Names a stage's jobs in Spark's web UI, cancels them on an interruption, and plans them with our settings."""

import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from txbox_spark.runtime.jvm import cause_of_death
from txbox_spark.runtime.lazy_imports import SparkContext, SparkSession

CALL_ATTEMPTS = 3
"""How often Java is called if it does not answer."""


def is_local(context: SparkContext) -> bool:
    """Return whether tasks run in the driver's JVM; those of ``local-cluster`` run on executors."""
    return str(context.master).partition("[")[0] == "local"


@contextmanager
def job_group(context: SparkContext, description: str) -> Iterator[str]:
    """Put this thread's jobs into their own group, and yield its name; cancel them if the block raises."""
    theirs = {name: context.getLocalProperty(name) for name in _JOB_GROUP}
    group = f"txbox-{secrets.token_hex(6)}"
    context.setJobGroup(group, description, interruptOnCancel=True)
    try:
        yield group
    except BaseException:
        _insist(context.cancelJobGroup, group)
        raise
    finally:
        # The thread, and its next jobs, belong to the caller, which may be a stream.
        for name, value in theirs.items():
            _insist(context.setLocalProperty, name, value)


@contextmanager
def small_plans(spark: SparkSession) -> Iterator[None]:
    """Keep Spark's optimizer from inferring constraints until the block ends.

    To infer them, Spark repeats every condition for each way to name its columns. A condition over 20 renamed columns
    becomes two to the power of 20 conditions, and our conditions are over every column.

    The setting belongs to the session. Plans that other threads make meanwhile infer no constraints either; their rows
    are the same.
    """
    key: int = spark._jsparkSession.hashCode()  # noqa: SLF001 - each batch of a stream wraps it in another object
    with _inferring:
        users, before = _without.get(key, (0, spark.conf.get(_INFERENCE, None)))
        _without[key] = (users + 1, before)
        spark.conf.set(_INFERENCE, "false")
    try:
        yield
    finally:
        with _inferring:
            users, before = _without.pop(key)
            if users > 1:
                _without[key] = (users - 1, before)
            elif before is None:
                _insist(spark.conf.unset, _INFERENCE)
            else:
                _insist(spark.conf.set, _INFERENCE, before)


@contextmanager
def changed_settings(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Change settings of a session until the block ends; frames and expressions made in the block keep them."""
    before = {name: spark.conf.get(name, None) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, earlier in before.items():
            if earlier is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, earlier)


def _insist(call: Callable[..., object], *arguments: object) -> None:
    """Call Java, and again if it does not answer: an interruption breaks the connection in use."""
    from py4j.protocol import Py4JNetworkError

    for _ in range(CALL_ATTEMPTS - 1):
        with suppress(Py4JNetworkError, OSError):
            call(*arguments)
            return
        if cause_of_death() is not None:  # the caller's own call raises this
            return
    call(*arguments)


_JOB_GROUP = ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel")
_INFERENCE = "spark.sql.constraintPropagation.enabled"
_inferring = threading.Lock()
_without: dict[int, tuple[int, str | None]] = {}
"""By session: how many ``small_plans`` blocks are open, and what the setting was before."""
