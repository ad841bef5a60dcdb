"""PostgreSQL, AWS and SMTP on this machine, for `txbox dev`, the demo and the tests.

The servers are real ones, reached over TCP on 127.0.0.1, and end with the program that started them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from txbox_local.aws.aws import LocalAws
    from txbox_local.errors import EmbeddedServerError
    from txbox_local.postgres.postgres import EmbeddedPostgres
    from txbox_local.smtp import AcceptedMail, LocalSmtp

__all__ = ["AcceptedMail", "EmbeddedPostgres", "EmbeddedServerError", "LocalAws", "LocalSmtp"]

_MODULES = {
    "AcceptedMail": "smtp",
    "EmbeddedPostgres": "postgres.postgres",
    "EmbeddedServerError": "errors",
    "LocalAws": "aws.aws",
    "LocalSmtp": "smtp",
}


def __getattr__(name: str) -> Any:
    # Imported when asked for: the servers' own programs live in this package and need none of it.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
