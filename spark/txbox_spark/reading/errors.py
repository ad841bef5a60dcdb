"""Errors that say in one line why events cannot be read."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from txbox import TxboxError
from txbox_spark.runtime.explanations import describe_spark_error, text_of
from txbox_spark.runtime.lazy_imports import spark_errors


class SourceError(TxboxError):
    """Events cannot be read from their source; the message says what to do."""


class EncodingError(ValueError):
    """Something cannot be done with files in this encoding; the message says why."""


class InvalidFields(SourceError):
    """The columns given for a source are not valid Spark DDL."""


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn Spark's errors in the block into a ``SourceError`` of one line: ``what`` failed, and why."""
    try:
        yield
    except EncodingError as error:
        raise SourceError(f"{what}: {error}") from error
    except spark_errors() as error:
        text = text_of(error)
        raise SourceError(f"{what}: {_why(text) or type(error).__name__}") from error


def _why(text: str) -> str:
    _, conflict, rest = text.partition("[CANNOT_MERGE_SCHEMAS]")
    if conflict:
        schemas = " ".join(rest.partition("SQLSTATE")[0].split())
        return f"{schemas} Give a schema with types that hold what every file has, or read the files apart"
    if "[FAILED_JDBC" in text and (cause := _CAUSE.search(text)) is not None:  # Spark itself says only that it failed
        return cause[1]
    return describe_spark_error(text)


_CAUSE = re.compile(r"^Caused by: [\w.$]+: (.+)$", re.MULTILINE)
