"""When a relay reports, and what it says of destinations that it cannot reach; without a database."""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from txbox.relay import reporter as reporter_module
from txbox.relay.reporter import OUTAGE_CHARACTERS, OUTAGE_SECONDS, OUTAGES, RelayReporter
from txbox.relay.sender import RelayStatements


class Connection:
    """Remembers what was reported, in place of a database."""

    def __init__(self) -> None:
        self.reports: list[dict[str, Any]] = []
        self.broken = False
        self.dialect = SimpleNamespace(driver="psycopg")
        self.server = SimpleNamespace(backend_pid=7)
        driver = SimpleNamespace(pgconn=self.server, autocommit=True)
        self.connection = SimpleNamespace(driver_connection=driver, dbapi_connection=driver)

    def exec_driver_sql(self, _: str, parameters: dict[str, Any] | None = None) -> None:
        if self.broken:
            raise ConnectionError
        if parameters is not None and "outages" in parameters:
            self.reports.append(parameters)

    def commit(self) -> None: ...


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1_000.0]
    monkeypatch.setattr(reporter_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.fixture
def connection() -> Connection:
    return Connection()


@pytest.fixture
def reporter(clock: list[float]) -> RelayReporter:
    return RelayReporter("r", RelayStatements.load(), None)


@pytest.fixture
def work(reporter: RelayReporter, connection: Connection, clock: list[float]) -> Callable[..., int]:
    """Let time pass, have it work, and return how many reports there are."""

    def work(seconds: float = 0.0, sent: int = 0) -> int:
        clock[0] += seconds
        reporter.work(connection, sent, 0)  # type: ignore[arg-type]
        return len(connection.reports)

    return work


def said(connection: Connection) -> dict[str, str]:
    found: dict[str, str] = json.loads(connection.reports[-1]["outages"])
    return found


def test_the_second_report_comes_soon_and_has_a_rate(work: Callable[..., int], connection: Connection) -> None:
    assert [work(), work(0.9), work(0.2, sent=33), work(9), work(1.1, sent=134)] == [1, 1, 2, 2, 3]
    assert [report["sent"] for report in connection.reports] == [0, 33, 134]
    assert [round(report["sent_per_second"], 3) for report in connection.reports] == [0.0, 30.0, 10.0]


def test_news_are_reported_within_a_second_and_what_is_known_is_not(
    work: Callable[..., int], reporter: RelayReporter, connection: Connection
) -> None:
    work()
    assert work(1.0) == 2
    reporter.lost("a", "no\n such\0queue")
    assert [work(0.5), work(0.6)] == [2, 3]
    assert said(connection) == {"a": "no such\N{REPLACEMENT CHARACTER}queue"}
    reporter.lost("a", "no\n such\0queue")
    reporter.restored("b")
    assert work(5) == 3
    reporter.lost("a", "no right")
    assert work() == 4
    assert said(connection) == {"a": "no right"}
    reporter.restored("a")
    assert work(1) == 5
    assert said(connection) == {}


def test_news_that_could_not_be_reported_stay_due(
    work: Callable[..., int], reporter: RelayReporter, connection: Connection
) -> None:
    work()
    work(1)
    reporter.lost("a", "gone")
    connection.broken = True
    with pytest.raises(ConnectionError):
        work(1)
    connection.broken = False
    assert work() == 3


def test_a_report_has_a_bounded_size_and_the_last_that_were_lost(
    work: Callable[..., int], reporter: RelayReporter, connection: Connection
) -> None:
    for number in range(OUTAGES + 5):
        reporter.lost(f"d{number}", "x" * 10_000)
        reporter.lost("d0", "again and again")
    work()
    found = said(connection)
    assert len(found) == OUTAGES
    assert {"d0", f"d{OUTAGES + 4}"} <= found.keys()
    assert "d1" not in found
    assert max(map(len, found.values())) == OUTAGE_CHARACTERS


def test_what_was_not_tried_for_long_is_forgotten(
    work: Callable[..., int], reporter: RelayReporter, connection: Connection
) -> None:
    reporter.lost("a", "gone")
    work()
    work(OUTAGE_SECONDS - 1)
    assert said(connection) == {"a": "gone"}
    work(11)
    assert said(connection) == {}
