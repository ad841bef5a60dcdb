"""``txbox demo``: exact in spite of everything."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from sqlalchemy import Engine

from support.broken_demo import patient_notification, take_place
from support.program import Ended, Running
from support.program import txbox as run_process
from txbox_demo.checker import DemoReport
from txbox_demo.processes import COMMITTED, LEASED, MAILED, RECEIVED, ROLES

if TYPE_CHECKING:
    from txbox_local import LocalAws

pytestmark = pytest.mark.chaos

DEMO = ("demo", "--without-spark")
SUBSCRIBERS = ("billing", "notification")


class Run(NamedTuple):
    """What a run of the demo has left behind."""

    ended: Ended
    report: dict[str, Any]
    schemas: list[str]
    queues: list[str]


@pytest.fixture(scope="module")
def a_run(
    database_url: str, aws: "LocalAws", admin: Engine, left: Callable[[], Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Run]:
    """A small demo, which keeps its schema and its queues."""
    file = tmp_path_factory.mktemp("demo") / "figures.json"
    arguments = ("--purchases", "400", "--url", database_url, "--keep", "--json", str(file))
    ended = run_process(*DEMO, *arguments, timeout=280)
    run = Run(ended, json.loads(file.read_text()) if ended.status in (0, 1) else {}, *left())
    with admin.begin() as connection:
        for schema in run.schemas:
            connection.exec_driver_sql(f"ALTER SCHEMA {schema} RENAME TO seen_{schema}")
    yield run
    with admin.begin() as connection:
        for schema in run.schemas:
            connection.exec_driver_sql(f"DROP SCHEMA seen_{schema} CASCADE")


def is_exact(report: dict[str, Any], purchases: int, by_the_file: int) -> None:
    figures = report["figures"]
    assert (report["exact"], [what for what, ids in report["wrong"].items() if ids]) == (True, [])
    assert report["cents"] == {"by the file": by_the_file, "in the accounts": by_the_file, "difference": 0}
    assert figures["orders"] == purchases
    assert figures["rolled back"] > 0
    assert figures["sent"] > 2.1 * purchases
    for subscriber in SUBSCRIBERS:
        delivered, duplicates = figures[f"{subscriber}: delivered"], figures[f"{subscriber}: duplicates"]
        assert figures[f"{subscriber}: processed"] == figures[f"audit of {subscriber}"] == purchases
        # About one in seven is sent again, as its answer was lost. How many acks get lost depends on the size of calls.
        assert delivered - purchases >= duplicates >= 0.03 * purchases
    assert figures["mailed once"] + figures["mailed again"] == purchases
    assert figures["mails"] >= figures["mailed once"] + 2 * figures["mailed again"]


@pytest.mark.timeout(300)
def test_it_is_exact(a_run: Run) -> None:
    assert a_run.ended.status == 0, a_run.ended.err
    is_exact(a_run.report, 400, 1_466_301)
    for role in ROLES:
        assert sum(a_run.report["kills"][role].values()) >= 1, role
    assert "\x1b" not in a_run.ended.out + a_run.ended.err


def test_keep_keeps_schema_and_queues(a_run: Run, admin: Engine, database_url: str) -> None:
    (schema,), (first, second) = a_run.schemas, sorted(a_run.queues, reverse=True)
    assert f"kept: schema {schema}, queues {first} {second}\n" in a_run.ended.out
    ended = run_process("status", "--url", database_url, "--schema", f"seen_{schema}", "--queue", first, "--json")
    assert json.loads(ended.out)["inbox_rows"] == 400
    with admin.connect() as connection:
        leases = connection.exec_driver_sql(
            f"SELECT completed_at IS NOT NULL, count(*) FROM seen_{schema}.message_lease GROUP BY 1"
        )
        assert leases.all() == [(True, 400)]


def test_it_is_exact_without_a_broker(run_quickly: Callable[..., DemoReport], left: Callable[[], Any]) -> None:
    before = left()
    report = run_quickly(400, postgres=True, kills=8)
    figures = {name: figure for name, (figure, _) in report.figures.items()}
    assert report.exact, report.wrong
    assert report.cents == {"by the file": 1_466_301, "in the accounts": 1_466_301, "difference": 0}
    assert [role for role, moments in report.kills.items() if moments] == ["shop", "billing", "notification"]
    # What billing has committed is settled with it. A mail is not: it may have been sent and not be settled.
    assert (figures["billing: processed"], figures["billing: duplicates"]) == (400, 0)
    assert figures["mailed once"] + figures["mailed again"] == 400
    assert left() == before


@pytest.mark.parametrize(("moment", "again"), [(RECEIVED, False), (LEASED, False), (MAILED, True), (COMMITTED, False)])
def test_only_a_worker_killed_between_mail_and_completion_has_a_mail_come_twice(
    moment: str, again: bool, run_quickly: Callable[..., DemoReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    take_place(monkeypatch, patient_notification, moments=(moment,))
    report = run_quickly(100, kills=8)
    killed = report.kills["notification"][moment]
    assert report.exact, report.wrong
    assert killed >= 1
    figures = {name: figure for name, (figure, _) in report.figures.items()}
    assert figures["mailed again"] == (killed if again else 0)
    assert figures["mails"] == 100 + figures["mailed again"]


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_it_is_exact_as_people_run_it(on_its_own: None, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    with Running("demo", "--json", str(file)) as running:
        assert running.wait(timeout=680) == 0
    report = json.loads(file.read_text())
    is_exact(report, 3_000, report["cents"]["by the file"])
    assert report["seconds"] < 120  # more than that is not watched
    for subscriber in SUBSCRIBERS:
        assert report["figures"][f"{subscriber}: duplicates"] >= 300
    for role, (_, moments) in ROLES.items():
        for moment in moments:
            assert report["kills"][role].get(moment, 0) >= 1, (role, moment)
    act, figures = report["spark_stage"], report["spark_stage"]["figures"]
    assert (act["exact"], act["cents"]["difference"], act["cents"]["in the accounts"]) == (True, 0, 250_031_563)
    assert figures["read by Spark"] == 69_659
    # Both were first with some: a third was sent before the load, and a chunk merged before the rest was sent.
    assert figures["applied by Spark"] + figures["applied by workers"] == 69_659
    assert 0 < figures["applied by workers"] == figures["found processed"] < 6_966


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_file_is_exact(on_its_own: None, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    with Running(*DEMO, "--purchases", "69659", "--json", str(file)) as running:
        assert running.wait(timeout=1740) == 0
    is_exact(json.loads(file.read_text()), 69_659, 250_031_563)
