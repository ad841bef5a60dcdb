"""Errors of starting and stopping the local servers."""

import errno
import re
from pathlib import Path

from txbox.errors import TxboxError, install_command

LOG_TAIL_LINES = 20
NO_SPACE = "No space left on device"


class LocalServerError(TxboxError):
    """A local server could not be started. The message says what to do.

    `pid` is the process in the way, if there is one; `log` holds the last lines that the server wrote.
    """

    def __init__(self, message: str, *, pid: int | None = None, log: str = "") -> None:
        super().__init__(f"{message}\n{log}" if log else message)
        self.pid = pid
        self.log = log


def missing_extra(missing: ImportError | None = None) -> LocalServerError:
    """Return the error for an environment without the local servers."""
    detail = f" ({missing.name} is missing)" if missing is not None and missing.name else ""
    return LocalServerError(f"the local servers are not installed{detail}: {install_command('embedded')}")


def no_space(error: OSError) -> LocalServerError | None:
    """Return the error for a full disk if `error` reports one, otherwise None."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _full(f": {error.filename}" if error.filename else "")
    if "No usable temporary directory" in str(error):
        return LocalServerError(
            f"{error.strerror}: they are full, or may not be written to; set TMPDIR to another directory"
        )
    return None


def server_failed(program: str, log: str, *, port: int | None = None) -> LocalServerError:
    """Return the error for a failed program of PostgreSQL: first the cause, then what to do, then the log."""
    if NO_SPACE in log:
        return _full("", log)
    complaint = _COMPLAINT.search(log)
    cause = complaint.group(1).strip() if complaint else "it did not say why"
    if "could not bind" in cause and "Permission denied" in cause:
        return LocalServerError(
            f"port {port} of 127.0.0.1 is not for ordinary users (permission denied): name a port from 1024 on", log=log
        )
    return LocalServerError(f"{program} failed: {cause}{'; its log ends with:' if log else ''}", log=log)


def _full(where: str, log: str = "") -> LocalServerError:
    return LocalServerError(
        f"the disk is full{where}: free some space, or name another directory (TMPDIR, if it is a temporary one)",
        log=log,
    )


_COMPLAINT = re.compile(r"(could not .*|(?<=FATAL:).*|(?<=PANIC:).*|(?<=ERROR:).*|(?<=initdb: error:).*)")
"""The first line of a log that names a cause. Later ones are its consequences."""


def log_tail(log: Path, lines: int = LOG_TAIL_LINES) -> str:
    """Return the last lines of `log`, or nothing if there is no log."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-lines:])
