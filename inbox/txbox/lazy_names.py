"""Public names that a package imports on first use (PEP 562).

The package imports them for type checkers only, and names their modules for Python::

    if TYPE_CHECKING:
        from txbox.inbox.inbox import Inbox
    else:
        __getattr__, __dir__ = lazy_names(__name__, {"Inbox": "txbox.inbox.inbox"})

https://peps.python.org/pep-0562/
"""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the functions ``__getattr__`` and ``__dir__`` for a package.

    Args:
        package: its ``__name__``.
        modules: by public name, the module that defines it.
    """

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)
        value = getattr(import_module(modules[name]), name)
        vars(sys.modules[package])[name] = value  # looked up once
        return value

    return find, lambda: sorted({*vars(sys.modules[package]), *modules})
