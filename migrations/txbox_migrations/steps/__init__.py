"""The steps that build txbox's tables, oldest first; a released step never changes.

Each step is self-contained. It describes its tables itself and does not import them from ``txbox.schema``, which
changes over time. Names are wrapped in ``op.f`` so that a host's naming convention leaves them alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from alembic.operations import Operations

from txbox_migrations.steps import step_010_baseline

__all__ = ["BASELINE", "LATEST", "LIFTED_BY", "STEPS", "VersionStep"]

StepFunction = Callable[[Operations, str | None, str], None]
"""Takes alembic's operations, the schema (None: the search path) and the prefix of every name."""


@dataclass(frozen=True, slots=True)
class VersionStep:
    """One step from a version to the next, and back."""

    upgrade: StepFunction
    downgrade: StepFunction


BASELINE: Final = 10
"""The version to which the first step leads from nothing.

The numbers continue those of the ten steps before the first release, which the baseline replaces. So a number means the
same tables for ever: in a mark, in ``txbox_version``, in ``to=N`` of a host's revision. 10 is both the last version
from then and the first from now, and its tables are valid in both; 1 to 9 will never be reused.
"""

LIFTED_BY: Final = "48c2fd12"
"""The last commit with the ten steps; it brings tables of versions 1 to 9 to the baseline."""

STEPS = (VersionStep(step_010_baseline.upgrade, step_010_baseline.downgrade),)
"""The first step leads from version 0 to the baseline, each later one from the version before."""

LATEST = BASELINE + len(STEPS) - 1
"""The version of the tables that this release of txbox works with."""
