"""What the demo's parts need: orders, and a database with the services' tables."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from txbox_demo.orders import Orders
from txbox_demo.place import create_tables

PURCHASES_URL = "https://sqs.eu-central-1.amazonaws.com/123456789012/purchases"
NOTIFICATIONS_URL = "https://sqs.eu-central-1.amazonaws.com/123456789012/notifications"

MakeOrders = Callable[..., Orders]


@pytest.fixture
def make_orders(tmp_path: Path) -> MakeOrders:
    """Make orders: make_orders(**changes)."""

    def make(**changes: Any) -> Orders:
        settings: dict[str, Any] = {
            "role": "shop",
            "database_url": "postgresql://127.0.0.1:1/none",
            "purchases_url": PURCHASES_URL,
            "notifications_url": NOTIFICATIONS_URL,
            "purchases": 20,
            "visibility_seconds": 2,
            "smtp_port": 1,
            "directory": str(tmp_path),
        }
        return Orders(**{**settings, **changes})

    return make


@pytest.fixture
def services(engine: Engine) -> Engine:
    """An engine on txbox's tables and those of the services."""
    create_tables(engine)
    return engine
