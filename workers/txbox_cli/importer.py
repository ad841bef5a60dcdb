"""Imports what a user names as MODULE:NAME, and runs the user's code."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from txbox import TxboxError
from txbox_cli.errors import CommandFailed, UsageError


@dataclass(frozen=True, slots=True)
class Imported:
    """What MODULE:NAME is, or what it returned."""

    module: ModuleType  # where it was found
    name: str
    value: object  # the object itself; for a function without parameters, what it returned
    what: str  # describes it, for errors
    wanted: tuple[str, ...]
    """Names of its required parameters. A function that has some was not called."""
    fitting: tuple[str, ...]  # names in the same module that would fit


def load(target: str, fits: Callable[[object], bool], *, such_as: str) -> Imported:
    """Import MODULE:NAME. Call it if it is a function without required parameters.

    Args:
        target: MODULE:NAME.
        fits: tells whether an object is of the wanted kind, and so is not called.
        such_as: an example, for the error.

    Returns:
        What was found. The caller checks whether it fits, as it knows what to suggest instead.

    Raises:
        UsageError: there is no such module or name.
        CommandFailed: the module exists, and its own code raised.
    """
    module, name = find(target, such_as=such_as)
    found = getattr(module, name, None)
    fitting = tuple(sorted(each for each, value in vars(module).items() if each[:1] != "_" and fits(value)))
    if found is None:
        hint = f"; it has {', '.join(fitting)}" if fitting else ""
        raise UsageError(f"module {module.__name__} has no {name}{hint}")
    what = f"{target} is a {type(found).__name__}"
    wanted = _required_parameters(found)
    if wanted:
        kind = "class" if isinstance(found, type) else type(found).__name__
        what = f"{target} is the {kind} {name}({', '.join(wanted)})"
    elif callable(found) and not fits(found):
        with own_code_of(f"{target}()"):
            found = found()
        what = f"{target}() returned a {type(found).__name__}"
    return Imported(module, name, found, what, wanted, fitting)


def find(target: str, *, such_as: str) -> tuple[ModuleType, str]:
    """Import the module of MODULE:NAME, with the current directory on the path.

    Args:
        target: MODULE:NAME.
        such_as: an example, for the error.

    Returns:
        The module and the name, which the module may not have.

    Raises:
        UsageError: there is no such module, or ``target`` has another form.
        CommandFailed: the module exists, and its own code raised.
    """
    module_name, colon, name = target.partition(":")
    if not (module_name and colon and name):
        raise UsageError(f"{target!r} is not of the form MODULE:NAME, such as {such_as}")
    if module_name.endswith(".py") or "/" in module_name or name.endswith("()"):
        plain = ".".join(part for part in module_name.removesuffix(".py").split("/") if part.strip("."))
        raise UsageError(f"{target!r} is not of the form MODULE:NAME; give {plain}:{name.removesuffix('()')}")
    return _import(module_name), name


@contextmanager
def own_code_of(what: str) -> Iterator[None]:
    """Turn what the user's code raises into one line. ``--debug`` shows the traceback."""
    try:
        yield
    except TxboxError:
        raise
    except (Exception, SystemExit) as error:
        hint = ""
        missing = error.args[0] if isinstance(error, KeyError) and error.args else None
        if isinstance(missing, str) and missing.isupper() and missing not in os.environ:
            hint = " (if it is an environment variable, set it, such as by source dev.env)"
        raise CommandFailed(f"{what} failed: {type(error).__name__}: {error}{hint}; --debug shows where") from error


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


def _required_parameters(found: object) -> tuple[str, ...]:
    """Return the names of the required parameters; a factory has none."""
    if not callable(found):
        return ()
    from txbox.leases.handlers import signature_of

    signature = signature_of(found)
    if signature is None:  # written in C
        return ()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = signature.parameters.values()
    return tuple(one.name for one in parameters if one.default is one.empty and one.kind not in variable)
