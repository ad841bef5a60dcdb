"""Text that Postgres can hold, and the text of errors, even of those whose ``str`` raises."""

import logging
import socket
import sys
from contextlib import suppress


def log_failure(what: str, *arguments: object) -> None:
    """Log the exception being handled with its traceback, or with its text alone if the traceback cannot be made.

    ``what`` and ``arguments`` are as for ``logging``. This never raises, whatever the exception or a log handler does.
    """
    error = sys.exception()
    try:
        _log.exception(what, *arguments)
    except BaseException:  # noqa: BLE001 - see above
        with suppress(BaseException):
            _log.error(f"{what}: %s", *arguments, "" if error is None else text_of(error))


def text_of(error: BaseException) -> str:
    """Return the text of an error. If its ``str`` raises, return the error's type and what was raised."""
    try:
        return str(error)
    except BaseException as broken:  # noqa: BLE001 - an error that cannot be printed is still to be reported
        return f"{type(error).__name__} (str() of it raised {type(broken).__name__})"


_log = logging.getLogger("txbox.threads")


MAX_HOST_CHARACTERS = 255
"""The longest name that POSIX allows."""


def storable(text: str) -> str:
    """Return text in which everything is replaced or dropped that Postgres's text and jsonb cannot hold."""
    return text.replace("\0", "�").encode("utf-8", "replace").decode()


def host_name() -> str:
    """Return this machine's name. It may hold any bytes; they are made storable so that no report fails."""
    return storable(socket.gethostname())[:MAX_HOST_CHARACTERS]
