"""Describes errors of Postgres and Spark in one line, with the cause and without the events' data.

Events must not end up in logs. Postgres quotes values, and whole rows, in its details, and in its messages about
invalid values. Spark quotes the statements that it sent, and prints pages of Java.
"""

import re

import psycopg

ABOUT_DATA = ("22", "23")
"""The SQLSTATE classes whose details hold values: data exceptions and violated constraints."""


def describe_postgres_error(error: psycopg.Error, where: str = "") -> str:
    """Return an error of Postgres in one line: its message, its hint, and its detail unless that quotes data.

    ``where`` is appended to the message.
    """
    diagnostic = error.diag
    if diagnostic.message_primary is None:
        return _line(str(error))
    about_data = (diagnostic.sqlstate or "")[:2] in ABOUT_DATA
    message = diagnostic.message_primary
    parts = [
        (without_values(message) if about_data else message).removesuffix(".") + where,
        None if about_data else diagnostic.message_detail,
        diagnostic.message_hint,
    ]
    return _line("; ".join(part.removesuffix(".") for part in parts if part))


def without_values(message: str) -> str:
    """Return a Postgres message about a value without the value."""
    if _NAMES_ONLY.search(message):
        return message
    return _QUOTED.sub("…", message).removesuffix(": …")


def text_of(error: Exception) -> str:
    """Return Spark's text of an error, with Java's causes, which pyspark's own exceptions keep separately."""
    return "\n".join(filter(None, (str(error), getattr(error, "_stackTrace", None))))


def is_out_of_memory(text: str) -> bool:
    """Return whether Java reports that it ran out of memory: the heap, or the off-heap memory that Arrow takes."""
    return _OUT_OF_MEMORY.search(text) is not None


def describe_spark_error(text: str) -> str:
    """Return an error of Spark in one line: the file it cannot read, the error of Postgres, or its first line."""
    if refused := _BY_POSTGRES.search(text):
        return f"Postgres says: {without_values(_line(refused[1]))}"
    if unread := _FILE.search(text):
        causes = [_line(one) for one in _CAUSE.findall(text)]
        why = f" ({causes[-1]})" if causes else ""
        remedy = next((one for sign, one in _REMEDIES if sign in why), _DAMAGED)
        return f"the file {unread[1]} cannot be read{why}; {remedy}"
    if (about_data := _SPARK_ABOUT_DATA.search(text)) is not None:
        text = _IN_QUOTES.sub("…", text[: about_data.end()])
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    if len(lines) > 1 and lines[0].startswith("An error occurred while calling"):
        del lines[0]
    if lines[0].endswith(_AWAITED) and (causes := _CAUSE.findall(text)):
        return _line(causes[-1])
    return lines[0].lstrip(": ")


def is_about_lost_executors(text: str) -> bool:
    """Return whether a Spark job failed because its executors died, or because what they wrote was lost with them."""
    failure = _LAST_FAILURE.search(text)
    return failure is not None and _LOST_EXECUTOR.search(failure[1]) is not None


def _line(text: str) -> str:
    return " ".join(text.split())


_LAST_FAILURE = re.compile(r"Job aborted due to stage failure: (.*(?:\n.*)?)")
_LOST_EXECUTOR = re.compile(
    r"ExecutorLostFailure|Most recent failure reason:\s*(?:org\.apache\.spark\.shuffle\.)?(?:Metadata)?FetchFailed"
)
_NAMES_ONLY = re.compile(r"\b(constraint|relation)\b")
_QUOTED = re.compile(r'["«»„“”].*["«»„“”]', re.DOTALL)
_SPARK_ABOUT_DATA = re.compile(r"SQLSTATE: 22\w{3}")
_IN_QUOTES = re.compile("'.*'", re.DOTALL)
_BY_POSTGRES = re.compile(r"(?:was aborted|PSQLException): ERROR: (.*?)(?:  Call getNextException|\n|$)")
_FILE = re.compile(r"\[FAILED_READ_FILE[^\]]*\] Encountered error while reading file (.+?)\.(?:\s|$)")
_DAMAGED = "if it is cut off or damaged, write it again, or leave it out"
_REMEDIES = (
    ("CSV header", "its header must name the columns of the other files, or of the schema"),
    ("physicalType: ", "in the schema, give the column a type that holds what the file has"),
)
"""What to do about an undamaged file, by a part of the cause."""
_OUT_OF_MEMORY = re.compile(r"\bOutOf(?:Direct)?Memory(?:Error|Exception)\b")
_AWAITED = "Exception thrown in awaitResult:"
"""All that Spark says about a failure in another thread, apart from the cause."""
_CAUSE = re.compile(r"^Caused by: [\w.$]+: (.+)$", re.MULTILINE)
