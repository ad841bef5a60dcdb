"""The steps that build txbox's tables, oldest first; a released step never changes.

Each step is a file ``step_NNN_….py`` and a revision of our alembic history. It is self-contained: it describes its
tables itself and does not import them from ``txbox.schema``, which changes over time. Names are wrapped in ``op.f`` so
that a host's naming convention leaves them alone.
"""

from importlib import import_module
from pkgutil import iter_modules
from typing import Final, Protocol, cast

from alembic.operations import Operations

__all__ = ["BASELINE", "LATEST", "LIFTED_BY", "STEPS", "VersionStep"]


class VersionStep(Protocol):
    """One step from a version to the next, and back.

    ``schema`` is that of the tables (None: the search path), ``prefix`` that of every name.
    """

    def upgrade(self, op: Operations, schema: str | None, prefix: str) -> None: ...

    def downgrade(self, op: Operations, schema: str | None, prefix: str) -> None: ...


BASELINE: Final = 10
"""The version to which the first step leads from nothing.

The numbers continue those of the ten steps before the first release, which the baseline replaces. So a number means the
same tables for ever: in a mark, in ``txbox_version``, in ``to=N`` of a host's revision. 10 is both the last version
from then and the first from now, and its tables are valid in both; 1 to 9 will never be reused.
"""

LIFTED_BY: Final = "48c2fd12"
"""The last commit with the ten steps; it brings tables of versions 1 to 9 to the baseline."""

STEPS = tuple(
    cast("VersionStep", import_module(f"{__name__}.{name}"))
    for name in sorted(module.name for module in iter_modules(__path__))
)
"""The first step leads from version 0 to the baseline, each later one from the version before."""

LATEST = BASELINE + len(STEPS) - 1
"""The version of the tables that this release of txbox works with."""
