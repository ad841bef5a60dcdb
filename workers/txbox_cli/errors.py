"""Turns an exception into one line that says what is wrong and what to do."""

import re
import sys
import sysconfig
import traceback
from typing import TYPE_CHECKING

from txbox.errors import BrokerError, SchemaMissing, TxboxError

if TYPE_CHECKING:
    import psycopg
    from sqlalchemy.exc import DBAPIError


class UsageError(TxboxError):
    """Wrong arguments: exit status 2."""


class CommandFailed(TxboxError):
    """The command failed: exit status 1."""


class Interrupted(TxboxError):
    """The command was interrupted, and its text says how to continue: exit status 130."""


def explain(error: BaseException) -> str:
    """Return one line that says what is wrong and what to do."""
    return mask(_one_line(_explanation(error)))


def mask(text: str) -> str:
    """Mask the password of every URL in a text."""
    return _PASSWORD_IN_QUERY.sub(r"\1***", _WORD.sub(_mask_url, text))


def _mask_url(found: re.Match[str]) -> str:
    """Mask the password of a URL in a text without blanks, in time linear in its length.

    The password ends at the last @: it may contain characters that should have been written %40 or %2F.
    """
    word = found[0]
    end = word.rfind("@")
    user = _USER_IN_URL.search(word, 0, end + 1)
    return f"{word[: user.end(1)]}:***{word[end:]}" if user else word


def masked_traceback(error: BaseException) -> str:
    """Return an error's traceback, with the passwords in it masked."""
    return mask("".join(traceback.format_exception(error)))


def _explanation(error: BaseException) -> str:
    if isinstance(error, ImportError) and re.search(r"\bpsycopg\b", str(error)):  # what follows would import it, too
        machine = f"{sysconfig.get_platform()}, {64 if sys.maxsize > 2**32 else 32} bits"
        return (
            f"{error}; psycopg has no libpq for this machine ({machine}): pip install 'psycopg[binary]' on it, "
            "or install libpq (Debian and Ubuntu: apt-get install libpq5)"
        )
    from sqlalchemy.exc import SQLAlchemyError

    database_error = _behind(error)
    if database_error is not None:
        return _explain_database(database_error)
    if isinstance(error, BrokerError):
        return _with_remedy(str(error), _BROKER_REMEDIES)
    if isinstance(error, TxboxError | SQLAlchemyError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error)
    if isinstance(error, UnicodeEncodeError):
        return f"{error.object[error.start : error.end]!a} is not UTF-8, and was to be sent as text; correct it"
    if isinstance(error, ValueError) and str(error).startswith("Invalid endpoint"):
        return f"{error}; correct AWS_ENDPOINT_URL, AWS_ENDPOINT_URL_SQS or --queue"
    return f"{type(error).__name__}: {error}; this was not foreseen, --debug shows where it comes from"


def _behind(error: BaseException) -> "DBAPIError | psycopg.Error | None":
    """Return the database's own error if ours only wraps it."""
    import psycopg
    from sqlalchemy.exc import DBAPIError

    current: BaseException | None = error
    while current is not None and not isinstance(current, DBAPIError | psycopg.Error):
        current = current.__cause__ if type(current) is TxboxError or not isinstance(current, TxboxError) else None
    return current


def _explain_database(error: "DBAPIError | psycopg.Error") -> str:
    from txbox.postgres.sqlstates import PREPARED_REMEDY, UNDEFINED_COLUMN, UNDEFINED_TABLE, sqlstate

    text = _one_line(str(getattr(error, "orig", error)))
    code = sqlstate(error)
    if code == UNDEFINED_TABLE:
        return f"{text.split(' LINE ')[0]}; create the tables with {SchemaMissing.remedy}"
    if code == UNDEFINED_COLUMN:
        return f"{text.split(' LINE ')[0]}; bring the tables up to date with {SchemaMissing.remedy}"
    remedies = {"prepared statement": PREPARED_REMEDY, **_DATABASE_REMEDIES}
    if code is None:
        return _with_remedy(text, remedies, "is the server running, and is the URL right?")
    return _with_remedy(f"the database refused: {text}", remedies)


def _with_remedy(text: str, remedies: dict[str, str], otherwise: str = "") -> str:
    remedy = next((remedy for pattern, remedy in remedies.items() if pattern in text), otherwise)
    return f"{text}; {remedy}" if remedy else text


def _one_line(text: str) -> str:
    return " ".join(text.split())


_WORD = re.compile(r"\S+")
# The word password itself stays: our own examples contain it.
_USER_IN_URL = re.compile(r"(?<=\w)(://[^/\s:@]*):(?!password@)(?=..)")
_PASSWORD_IN_QUERY = re.compile(r"(\bpassword=)[^\s&'\"]+", re.IGNORECASE)

_DATABASE_REMEDIES = {
    "password authentication failed": "correct the user or the password in the URL",
    "no password supplied": "put the password into the URL",
    "Connection refused": "start the server, or correct host and port in the URL",
    "could not translate host name": "correct the host in the URL",
    "failed to resolve host": "correct the host in the URL",
    "does not exist": "create it, or correct the URL",
    "permission denied": "grant it to this user, or use another one",
    "timeout expired": "is the server reachable from here?",
    "bad value for": "correct what follows the ? in the URL",
    "invalid connection option": "correct what follows the ? in the URL",
}

_BROKER_REMEDIES = {
    "Could not connect": "is it running, and is AWS_ENDPOINT_URL right?",
}
