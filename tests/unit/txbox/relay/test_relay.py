"""What a relay refuses before it talks to a database."""

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import create_engine

from txbox import InvalidConfiguration
from txbox.relay import FunctionPublisher, Relay

NOWHERE = create_engine("postgresql+psycopg://127.0.0.1:1/none")
OWN = {"own": FunctionPublisher(print)}


@pytest.mark.parametrize(
    "options",
    [
        {"senders": 0},
        {"max_senders": 3},
        {"concurrency": 0},
        {"batch_size": 0},
        {"max_attempts": 0},
        {"keep_sent": timedelta(0)},
        {"keep_sent": timedelta(days=99_999_999)},
        {"keep_sent": 7},
        {"publish_timeout_seconds": 0.5},
        {"publishers": {}},
        {"publishers": {"inbox": OWN["own"]}},
    ],
)
def test_arguments_that_cannot_work_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfiguration, match=rf"Relay\.{next(iter(options))}") as refused:
        Relay(NOWHERE, **{"publishers": OWN, **options})
    if "max_senders" in options:
        assert "must be at least senders, 4, not 3" in str(refused.value)
