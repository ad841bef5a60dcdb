"""PostgreSQL, AWS and SMTP on this machine, for `txbox dev`, the demo and the tests.

The servers are real, are reached over TCP on 127.0.0.1, and end with the program that started them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from txbox_local.aws.local_aws import LocalAws
    from txbox_local.errors import LocalServerError
    from txbox_local.postgres.local_postgres import LocalPostgres
    from txbox_local.smtp import AcceptedMail, LocalSmtp

__all__ = ["AcceptedMail", "LocalAws", "LocalPostgres", "LocalServerError", "LocalSmtp"]

_MODULES = {
    "AcceptedMail": "smtp",
    "LocalPostgres": "postgres.local_postgres",
    "LocalServerError": "errors",
    "LocalAws": "aws.local_aws",
    "LocalSmtp": "smtp",
}


if not TYPE_CHECKING:  # otherwise type checkers would accept any name of this module

    def __getattr__(name: str) -> Any:
        # Imported on demand: the servers' own programs live in this package and need none of it.
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
