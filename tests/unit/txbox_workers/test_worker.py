"""What a worker refuses before it connects to anything."""

from typing import Any

import pytest
from sqlalchemy import create_engine

from txbox import Inbox, InvalidConfiguration
from txbox_workers.memory import MemorySource
from txbox_workers.worker import Worker


def do_nothing(*_: Any) -> None:
    pass


def make(**options: Any) -> Worker:
    return Worker(MemorySource(), inbox=Inbox("billing"), engine=create_engine("postgresql+psycopg://"), **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"handler": do_nothing, "threads": 0}, "Worker.threads must be at least 1, not 0"),
        ({"handler": do_nothing, "max_attempts": 0}, "Worker.max_attempts must be at least 1, or None, not 0"),
        ({"handler": do_nothing, "transactions": "x"}, "Worker.transactions must be 'batch' or 'message', not 'x'"),
        ({}, "Worker needs either handler or batch_handler, and not both"),
        (
            {"handler": do_nothing, "batch_handler": do_nothing},
            "Worker needs either handler or batch_handler, and not both",
        ),
    ],
    ids=["threads", "max_attempts", "transactions", "no handler", "both handlers"],
)
def test_an_argument_that_cannot_work_is_refused_by_its_name(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidConfiguration) as refused:
        make(**options)
    assert str(refused.value) == says


@pytest.mark.parametrize(
    "options",
    [
        {"handler": do_nothing, "threads": 1, "max_attempts": 1, "transactions": "message"},
        {"batch_handler": do_nothing, "max_attempts": None},
    ],
    ids=["handler", "batch_handler"],
)
def test_the_least_that_can_work_is_taken(options: dict[str, Any]) -> None:
    assert not make(**options).running
