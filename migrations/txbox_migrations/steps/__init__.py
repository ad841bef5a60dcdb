"""The steps that build txbox's tables, oldest first; a released step never changes.

Each step is self-contained. It describes its tables itself instead of importing them from ``txbox.schema``, which
moves on. Names are wrapped in ``op.f`` so that a host's naming convention leaves them alone.
"""

from collections.abc import Callable
from dataclasses import dataclass

from alembic.operations import Operations

from txbox_migrations.steps import (
    step_001_inbox,
    step_002_dead_letters,
    step_003_bulk_loads,
    step_004_outbox,
    step_005_leases,
    step_006_safeguards,
    step_007_operations,
    step_008_activity,
    step_009_archives,
    step_010_responses,
)

__all__ = ["LATEST", "STEPS", "Step"]

StepFunction = Callable[[Operations, str | None, str], None]
"""Takes alembic's operations, the schema (None: the search path) and the prefix of every name."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step from a version to the next, and back."""

    upgrade: StepFunction
    downgrade: StepFunction


STEPS = (
    Step(step_001_inbox.upgrade, step_001_inbox.downgrade),
    Step(step_002_dead_letters.upgrade, step_002_dead_letters.downgrade),
    Step(step_003_bulk_loads.upgrade, step_003_bulk_loads.downgrade),
    Step(step_004_outbox.upgrade, step_004_outbox.downgrade),
    Step(step_005_leases.upgrade, step_005_leases.downgrade),
    Step(step_006_safeguards.upgrade, step_006_safeguards.downgrade),
    Step(step_007_operations.upgrade, step_007_operations.downgrade),
    Step(step_008_activity.upgrade, step_008_activity.downgrade),
    Step(step_009_archives.upgrade, step_009_archives.downgrade),
    Step(step_010_responses.upgrade, step_010_responses.downgrade),
)
"""``STEPS[n - 1]`` leads from version n - 1 to version n."""

LATEST = len(STEPS)
"""The version of the tables that this release of txbox works with."""
