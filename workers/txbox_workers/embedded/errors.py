"""What starting and stopping the embedded servers can raise."""

from pathlib import Path

from txbox.errors import TxboxError

LOG_TAIL_LINES = 20


class EmbeddedServerError(TxboxError):
    """An embedded server could not be started; the message says what to do.

    `pid` is the process in the way, where there is one; `log` the last lines that the server wrote.
    """

    def __init__(self, message: str, *, pid: int | None = None, log: str = "") -> None:
        super().__init__(f"{message}\n{log}" if log else message)
        self.pid = pid
        self.log = log


def missing_extra(missing: ImportError | None = None) -> EmbeddedServerError:
    """The error for a program whose environment lacks the embedded servers."""
    detail = f" ({missing.name} is missing)" if missing is not None and missing.name else ""
    return EmbeddedServerError(f"the embedded servers are not installed{detail}: pip install 'txbox[embedded]'")


def log_tail(log: Path) -> str:
    """The last lines of `log`, or nothing when there is no log."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return "\n".join(lines[-LOG_TAIL_LINES:])
