"""What the demo's parts need: a task, and a database with the services' tables and the check's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from txbox_demo import checker, services
from txbox_demo.processes import COUNTS, DemoTask

QUEUE = "https://sqs.eu-central-1.amazonaws.com/123456789012/purchases"


@pytest.fixture
def make_task(tmp_path: Path) -> Callable[..., DemoTask]:
    """Make a task: make_task(**changes)."""

    def make(**changes: Any) -> DemoTask:
        settings: dict[str, Any] = {"database_url": "", "queue_urls": (QUEUE, QUEUE), "purchases": 20, "smtp_port": 1}
        settings |= {"seed": 1, "environment": {}, "log": str(tmp_path / "log")}
        return DemoTask(**(settings | changes), counts=[0] * len(COUNTS))

    return make


@pytest.fixture
def tables(engine: Engine) -> Engine:
    """An engine on txbox's tables, those of the services and those of the check."""
    with engine.begin() as connection:
        connection.exec_driver_sql(f"{services.TABLES};{checker.TABLES}")
    return engine
