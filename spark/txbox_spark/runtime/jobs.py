"""The jobs of one stage: named in Spark's pages, cancelled if the caller is interrupted, planned with our settings."""

import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from txbox_spark.runtime.jvm import cause_of_death
from txbox_spark.runtime.lazy_imports import SparkContext, SparkSession

CALL_ATTEMPTS = 3
"""How often Java is called if it does not answer."""


def is_local(context: SparkContext) -> bool:
    """Whether tasks run in the driver's own JVM, and not on executors (as those of ``local-cluster`` do)."""
    return str(context.master).partition("[")[0] == "local"


@contextmanager
def job_group(context: SparkContext, description: str) -> Iterator[str]:
    """Give the jobs of this thread a group of their own, and its name; they are cancelled if the block raises."""
    theirs = {name: context.getLocalProperty(name) for name in _JOB_GROUP}
    group = f"txbox-{secrets.token_hex(6)}"
    context.setJobGroup(group, description, interruptOnCancel=True)
    try:
        yield group
    except BaseException:
        _insist(context.cancelJobGroup, group)
        raise
    finally:
        # The thread is the caller's, perhaps a stream's, and so are its next jobs.
        for name, value in theirs.items():
            _insist(context.setLocalProperty, name, value)


@contextmanager
def small_plans(spark: SparkSession) -> Iterator[None]:
    """Keep Spark's optimizer from inferring constraints until the block ends.

    To infer them, Spark takes every condition once for each way to name its columns: a condition over 20 columns that
    all get another name is two to the power of 20 conditions. Ours are over every column.

    The setting is the session's. What other threads plan meanwhile infers none either, and gives the same rows.
    """
    key: int = spark._jsparkSession.hashCode()  # noqa: SLF001 - each batch of a stream has another object for it
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
    """Change settings of a session until the block ends; frames and expressions that are made in it keep to them."""
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
    """Call Java, again if it does not answer: an interruption breaks the connection that it meets."""
    from py4j.protocol import Py4JNetworkError

    for _ in range(CALL_ATTEMPTS - 1):
        with suppress(Py4JNetworkError, OSError):
            call(*arguments)
            return
        if cause_of_death() is not None:  # the caller's own call raises it
            return
    call(*arguments)


_JOB_GROUP = ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel")
_INFERENCE = "spark.sql.constraintPropagation.enabled"
_inferring = threading.Lock()
_without: dict[int, tuple[int, str | None]] = {}
"""By session: how many blocks are in ``small_plans``, and what the setting was before."""
