"""Chains and chords of Celery whose workers are killed at random: with an inbox, each effect once.

Redis' transport may lose a message with the worker that has taken it, and Celery the end of a chord. What has vanished
is sent again, under the same ids; that completes it. Plain tasks are the control: what doubles and vanishes of them.

``TXBOX_CHAINS_SECONDS`` makes it longer, ``TXBOX_CHAINS_SEED`` draws the same lots again.
"""

import os
import random
from collections import Counter
from pathlib import Path

import pytest
from sqlalchemy import Engine

from support.celery_shop.campaign import Campaign
from support.celery_shop.server import running_valkey
from support.celery_shop.workers import Workers
from support.workers.business import Business

SECONDS = float(os.environ.get("TXBOX_CHAINS_SECONDS", "6"))
"""How long workers are killed, for either task."""


@pytest.mark.chaos
@pytest.mark.timeout(SECONDS + 240)
@pytest.mark.parametrize("task", ["inbox", pytest.param("plain", marks=pytest.mark.slow)])
def test_chains_and_chords_under_kills(
    engine: Engine, schema_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    seed = int(os.environ.get("TXBOX_CHAINS_SEED") or random.randrange(2**32))
    notes = tmp_path / "notes"
    with running_valkey(tmp_path) as socket:
        redis_url = f"redis+socket://{socket}"
        monkeypatch.setenv("SHOP_REDIS_URL", redis_url)
        monkeypatch.setenv("SHOP_DATABASE_URL", schema_url)
        monkeypatch.setenv("SHOP_NOTES", str(notes))
        workers = Workers(tmp_path / "worker.log", app="links")
        campaign = Campaign(
            task, redis_url=redis_url, workers=workers, notes=notes, business=Business(engine), seed=seed
        )
        try:
            outcome = campaign.run(SECONDS)
        finally:
            workers.kill()
    print(f"{task}, seed {seed}: {outcome}")  # noqa: T201 - for -s, and for a failure
    lots = f"TXBOX_CHAINS_SEED={seed}"
    if task == "inbox":
        assert outcome.applied == Counter(outcome.ids), lots
    else:
        assert outcome.doubled, f"no kill has hit anything; {lots}"
