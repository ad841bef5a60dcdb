"""Features together: each promise holds whatever users and operators do at once.

``TXBOX_TOGETHER_SECONDS`` makes it longer, ``TXBOX_TOGETHER_SEED`` draws the same lots again.
"""

import os
import random
from datetime import timedelta

import pytest
from sqlalchemy import Engine

from support.together.world import World
from txbox.inbox import age_judge
from txbox.maintenance import retention, tasks

SECONDS = float(os.environ.get("TXBOX_TOGETHER_SECONDS", "5"))
"""How long each world lasts."""

LEVELS = ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")


@pytest.mark.chaos
@pytest.mark.timeout(SECONDS + 300)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("ordered", [False, True], ids=["unordered", "ordered"])
@pytest.mark.parametrize("rotating", [False, True], ids=["plain", "rotating"])
def test_nothing_is_lost_doubled_or_both_parked_and_processed(
    engine: Engine, schema_url: str, rotating: bool, ordered: bool, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The horizon is seconds away, not the least of an hour.
    monkeypatch.setattr(age_judge, "OLD_AFTER", timedelta())
    monkeypatch.setattr(retention, "MIN_WINDOW", timedelta())
    monkeypatch.setattr(tasks, "SLACK", timedelta())
    seed = int(os.environ.get("TXBOX_TOGETHER_SEED") or random.randrange(2**32))
    world = World(schema_url, engine, seed=seed, level=level, rotating=rotating, ordered=ordered)
    world.run(SECONDS)
    broken = world.broken_promises()
    print(f"seed {seed}: {len(world.sent)} messages, loaders of {[*world.loaders]}; {dict(world.done)}")  # noqa: T201 - for -s, and for a failure
    assert world.errors == []
    assert broken == [], f"TXBOX_TOGETHER_SEED={seed}"
