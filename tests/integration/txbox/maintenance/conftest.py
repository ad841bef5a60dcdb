"""Inboxes with old and new ids; what is left of them, read without any code under test."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine

from support.postgres.statements import run
from txbox import DeadLetter, Reason
from txbox.maintenance import Maintainer, Retention

KEPT = timedelta(days=30)

StartMaintainer = Callable[..., Maintainer]


def record(engine: Engine, subscriber_id: str, prefix: str, count: int, *, days_ago: float) -> None:
    """Put ids into the inbox as if they had been recorded so long ago, all at once, in one stretch of blocks."""
    run(
        engine,
        "INSERT INTO processed_message (subscriber_id, message_id, processed_at) "
        "SELECT %s, %s || number, now() - make_interval(secs => %s) FROM generate_series(1, %s) AS number",
        (subscriber_id, prefix, days_ago * 86_400, count),
    )


def found(engine: Engine, statement: str, *parameters: Any) -> Any:
    """The first value that a statement returns."""
    with engine.connect() as connection:
        return connection.exec_driver_sql(statement, parameters).scalar()


def left(engine: Engine) -> dict[str, int]:
    """How many ids are left, by what they begin with."""
    with engine.connect() as connection:
        rows = connection.exec_driver_sql(
            "SELECT rtrim(message_id, '0123456789'), count(*) FROM processed_message GROUP BY 1"
        )
        return {name: count for name, count in rows}  # noqa: C416 - a row is no tuple for mypy


def letter(message_id: str) -> DeadLetter:
    return DeadLetter("billing", message_id, Reason.FAILED, "error", 1, "queue", b"{}")


@pytest.fixture
def make_maintainer(engine: Engine) -> StartMaintainer:
    """Make a maintainer without a budget: make_maintainer(retention, **options)."""

    def make(retention: Retention | None = None, **options: Any) -> Maintainer:
        return Maintainer(options.pop("engine", engine), retention, **{"budget_ms_per_second": 1000, **options})

    return make
