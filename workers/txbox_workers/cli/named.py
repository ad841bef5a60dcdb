"""Finding what a user names as MODULE:NAME, and running code of theirs."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from txbox import TxboxError
from txbox_workers.cli.errors import CommandFailed, UsageError

__all__ = ["find", "own_code_of"]


def find(target: str, *, such_as: str) -> tuple[ModuleType, str]:
    """Import the module of MODULE:NAME, with the current directory on the path.

    Args:
        target: what was given.
        such_as: an example, for the error.

    Returns:
        The module, and the name in it, which may not be there.

    Raises:
        UsageError: there is no such module, or the form is another one.
        CommandFailed: the module is there, and its own code raised.
    """
    module_name, colon, name = target.partition(":")
    if not (module_name and colon and name):
        raise UsageError(f"{target!r} is not of the form MODULE:NAME, such as {such_as}")
    return _import(module_name), name


@contextmanager
def own_code_of(what: str) -> Iterator[None]:
    """Say in one line what the user's code raised; the traceback, with --debug, says where."""
    try:
        yield
    except TxboxError:
        raise
    except (Exception, SystemExit) as error:
        raise CommandFailed(f"{what} failed: {type(error).__name__}: {error}; --debug shows where") from error


def _import(module_name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        with own_code_of(f"module {module_name}"):
            return importlib.import_module(module_name)
    except CommandFailed as error:
        missing = error.__cause__
        if isinstance(missing, ModuleNotFoundError) and f"{module_name}.".startswith(f"{missing.name}."):
            raise UsageError(f"there is no module {module_name} here ({here}) or on the Python path") from missing
        raise
