"""Text that Postgres can hold, and the text of errors, also of those whose ``str`` raises."""

import logging
import socket
import sys
from contextlib import suppress


def log_failure(what: str, *arguments: object) -> None:
    """Log the exception that is handled now, with its traceback; with its text alone, where that cannot be made.

    ``what`` and ``arguments`` are as for ``logging``. Nothing is raised, whatever the exception or a handler of the log
    does.
    """
    error = sys.exception()
    try:
        _log.exception(what, *arguments)
    except BaseException:  # noqa: BLE001 - see above
        with suppress(BaseException):
            _log.error(f"{what}: %s", *arguments, "" if error is None else text_of(error))


def text_of(error: BaseException) -> str:
    """Return the text of an error; where ``str`` of it raises, its type and what it raised."""
    try:
        return str(error)
    except BaseException as broken:  # noqa: BLE001 - an error that cannot be printed is still to be reported
        return f"{type(error).__name__} (str() of it raised {type(broken).__name__})"


_log = logging.getLogger("txbox.threads")


MAX_HOST_CHARACTERS = 255
"""The longest name that POSIX allows."""


def storable(text: str) -> str:
    """Return text without what Postgres's text and jsonb cannot hold."""
    return text.replace("\0", "�").encode("utf-8", "replace").decode()


def host_name() -> str:
    """Return this machine's name; it may have any bytes, and no report fails for that."""
    return storable(socket.gethostname())[:MAX_HOST_CHARACTERS]
