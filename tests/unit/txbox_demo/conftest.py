"""What the demo's parts need: a task, and a database with the services' tables and the check's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from txbox_demo import check, services
from txbox_demo.processes import COUNTS, Process, Task

QUEUE = "https://sqs.eu-central-1.amazonaws.com/123456789012/purchases"


@pytest.fixture
def make_process(tmp_path: Path) -> Callable[..., Process]:
    """Make a process's own side: make_process(**changes of its task)."""

    def make(**changes: Any) -> Process:
        settings: dict[str, Any] = {"database_url": "", "queue_urls": (QUEUE, QUEUE), "purchases": 20, "smtp_port": 1}
        settings |= {"seed": 1, "environment": {}, "log": str(tmp_path / "log")}
        return Process(Task(**(settings | changes)), [0] * len(COUNTS))

    return make


@pytest.fixture
def tables(engine: Engine) -> Engine:
    """An engine on txbox's tables, those of the services and those of the check."""
    with engine.begin() as connection:
        connection.exec_driver_sql(f"{services.TABLES};{check.TABLES}")
    return engine
