"""What goes wrong in a data source, in one line: Spark shows whole tracebacks, with every cause."""

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from sqlalchemy.exc import SQLAlchemyError

from txbox import TxboxError
from txbox_spark.merging.failed_chunk import FailedChunk


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Raise errors without their causes, which may quote values, a statement, or parts of a URL.

    ``what`` says what cannot be done, if it is Postgres that says why.
    """
    try:
        yield
    except TxboxError as error:
        raise error from None
    except (SQLAlchemyError, psycopg.Error) as error:
        raise TxboxError(f"{what}: {FailedChunk.of(0, error).error}") from None
