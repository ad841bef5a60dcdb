"""Why events cannot be read from where they should be, in one line."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from txbox import TxboxError
from txbox_spark.runtime.explanations import describe_spark_error, text_of
from txbox_spark.runtime.lazy_imports import spark_errors


class SourceError(TxboxError):
    """Events cannot be read from where they should be; the message says what to do."""


class EncodingError(ValueError):
    """What is asked for cannot be had in this encoding; the message says why."""


class InvalidFields(SourceError):
    """The columns that a source is to have are not written as Spark takes them."""


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Raise what Spark raises as one line: what cannot be done, and why."""
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
    if "[FAILED_JDBC" in text and (cause := _CAUSE.search(text)) is not None:  # Spark says only that it failed
        return cause[1]
    return describe_spark_error(text)


_CAUSE = re.compile(r"^Caused by: [\w.$]+: (.+)$", re.MULTILINE)
