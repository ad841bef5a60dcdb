"""The command line: ``txbox``.

Every failure is one line on stderr that says what to do, and exit status 1 (it failed) or 2 (it was asked wrongly).
A traceback is shown only with ``--debug``.
"""

import sys

__all__ = ["main"]


def main() -> None:
    """Run ``txbox`` with the arguments of this process, and exit."""
    try:
        from txbox_cli.app import run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in _EXTRA:
            raise
        sys.stderr.write(f"txbox: {error.name} is missing; install the command line: pip install 'txbox[cli]'\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(run())


_EXTRA = ("typer", "rich", "pydantic", "pydantic_settings")
