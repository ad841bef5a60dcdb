"""The jobs that Spark runs for one stage of ours: named in its pages, and cancelled if the caller is interrupted."""

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark import SparkContext

__all__ = ["job_group"]

CALL_ATTEMPTS = 3
"""How often Java is called that does not answer."""


@contextmanager
def job_group(context: "SparkContext", description: str) -> Iterator[str]:
    """Give the jobs of this thread a group of their own until the block ends; if it raises, they are cancelled.

    Args:
        context: of the session.
        description: for Spark's pages.

    Returns:
        The name of the group.
    """
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


def _insist(call: Callable[..., object], *arguments: object) -> None:
    """Call Java again if it does not answer: an interruption breaks the connection that it meets."""
    from py4j.protocol import Py4JNetworkError

    for _ in range(CALL_ATTEMPTS - 1):
        with suppress(Py4JNetworkError):
            call(*arguments)
            return
    call(*arguments)


_JOB_GROUP = ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel")
