"""``txbox demo``: exact in spite of everything, able to see when it is not, and gone without a trace."""

import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from sqlalchemy import Engine, create_engine

from support.program import Running
from support.program import txbox as run_process
from support.waiting import wait_until
from txbox import TxboxError
from txbox_workers.cli.app import run as run_here
from txbox_workers.demo import place as demo_place
from txbox_workers.demo import run as demo_run
from txbox_workers.demo.crew import MOMENTS
from txbox_workers.demo.run import Plan, run_demo

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

    from txbox_workers.embedded import LocalAws


@pytest.fixture
def on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo finds no servers in the environment."""
    for name in ("TXBOX_DATABASE_URL", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_SQS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def admin(database_url: str) -> Iterator[Engine]:
    engine = create_engine(database_url)
    yield engine
    engine.dispose()


def schemas(admin: Engine) -> list[str]:
    with admin.connect() as connection:
        found = connection.exec_driver_sql("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'txbox_demo_%%'")
        return list(found.scalars())


def queues(sqs: "SQSClient") -> list[str]:
    return sqs.list_queues(QueueNamePrefix="txbox-demo-").get("QueueUrls", [])


DEMO = ("demo", "--without-spark")


def is_exact(figures: dict[str, Any], purchases: int) -> None:
    assert figures["exact"] is True
    assert figures["adds_up"] is True
    assert figures["contradictions"] == []
    assert figures["wrong_customers"] == []
    assert figures["difference_dollars"] == "0.00"
    assert figures["found_dollars"] == figures["expected_dollars"]
    assert figures["processed"] == figures["purchases"] == purchases
    outcomes = ("processed", "duplicates_rejected", "failed", "in_flight")
    assert figures["delivered"] == sum(figures[outcome] for outcome in outcomes)
    assert figures["duplicate_share"] >= 0.30
    assert figures["sent"]["resent"] > 0
    assert figures["sent"]["in_batches_sent_twice"] > 0
    assert figures["dead"] == 0


@pytest.mark.timeout(300)
def test_it_is_exact(on_its_own: None, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    ended = run_process(*DEMO, "--purchases", "600", "--json", str(file), timeout=280)
    assert ended.status == 0, ended.err
    assert ended.out.count("every customer is right to the cent") == 1
    assert "\x1b" not in ended.out + ended.err
    figures = json.loads(file.read_text())
    is_exact(figures, 600)
    assert (figures["customers"], figures["expected_dollars"]) == (150, "21968.03")
    assert figures["kills"]["total"] >= 8
    for moment in MOMENTS:
        assert figures["kills"][moment] >= 1, moment
    assert figures["workers_started"] > figures["kills"]["total"]
    shown = {
        "sent": f"{figures['sent']['messages']:,}",
        "delivered": f"{figures['delivered']:,}",
        "processed": "600",
        "duplicates rejected": f"{figures['duplicates_rejected']:,}",
        "kills": f"{figures['kills']['total']}",
        "dead": "0",
        "difference": "$0.00",
    }
    for name, figure in shown.items():
        assert re.search(rf"^ *{name} +{re.escape(figure)} ", ended.out, re.MULTILINE), f"{name}: {ended.out}"


def last_act_is_exact(act: dict[str, Any], purchases: int, out: str) -> None:
    assert (act["exact"], act["adds_up"], act["wrong_customers"], act["difference_cents"]) == (True, True, 0, 0)
    load = act["load"]
    assert (load["read"], load["rejected"], load["duplicate_in_source"]) == (69_659, 0, 0)
    assert load["applied"] + load["already_processed"] == act["recorded"] == 69_659
    # Both roads were first with some: a third was sent before the load, and a chunk merged before the rest was sent.
    assert 0 < act["processed_by_workers"] < purchases
    assert load["already_processed"] == act["processed_by_workers"]
    assert re.search(r"^ *in the accounts +\$2,500,315\.63 ", out, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_it_is_exact_as_people_run_it(on_its_own: None, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    with Running("demo", "--json", str(file)) as running:
        assert running.wait(timeout=380) == 0
    figures = json.loads(file.read_text())
    is_exact(figures, 7_000)
    last_act_is_exact(figures["last_act"], 7_000, "".join(running.out))
    assert figures["seconds"] < 120  # seconds; more than that nobody watches
    assert figures["kills"]["total"] >= 20
    for moment in MOMENTS:
        assert figures["kills"][moment] >= 5, moment


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_file_is_exact(on_its_own: None, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    with Running("demo", "--purchases", "69659", "--without-spark", "--json", str(file)) as running:
        assert running.wait(timeout=1740) == 0
    figures = json.loads(file.read_text())
    is_exact(figures, 69_659)
    assert (figures["customers"], figures["expected_dollars"]) == (23_570, "2500315.63")


# --- it can fail -----------------------------------------------------------------------------------------------------


def test_without_the_inboxs_key_the_accounts_are_wrong_and_it_says_so(
    database_url: str,
    aws: "LocalAws",
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    upgrade = demo_place.upgrade_database

    def upgrade_without_key(engine: Engine, *, schema: str) -> None:
        upgrade(engine, schema=schema)
        with engine.begin() as connection:
            connection.exec_driver_sql(f"ALTER TABLE {schema}.processed_message DROP CONSTRAINT processed_message_pkey")

    monkeypatch.setattr(demo_place, "upgrade_database", upgrade_without_key)
    file = tmp_path / "figures.json"
    assert run_here([*DEMO, "--purchases", "100", "--kills", "0", "--url", database_url, "--json", str(file)]) == 1
    figures = json.loads(file.read_text())
    assert figures["delivered"] > figures["sent"]["messages"]  # nobody was killed, so because acks got lost
    assert figures["exact"] is False
    assert figures["adds_up"] is False
    assert float(figures["difference_dollars"]) > 0
    assert float(figures["found_dollars"]) > float(figures["expected_dollars"])
    assert figures["wrong_customers"]
    assert any("processed twice" in contradiction for contradiction in figures["contradictions"])
    printed = capsys.readouterr().out
    assert "THE ACCOUNTS ARE WRONG" in printed
    assert "DOES NOT ADD UP" in printed
    assert "CONTRADICTION: " in printed


def test_an_effect_without_its_record_is_seen(
    database_url: str, aws: "LocalAws", admin: Engine, sqs: "SQSClient", monkeypatch: pytest.MonkeyPatch
) -> None:
    create_tables = demo_place.create_tables

    def create_tables_with_an_account(engine: Engine) -> None:
        create_tables(engine)
        with engine.begin() as connection:
            connection.exec_driver_sql("INSERT INTO account VALUES ('00001', 0, 0, 1)")

    monkeypatch.setattr(demo_place, "create_tables", create_tables_with_an_account)
    report = run_demo(Plan(purchases=50, workers=2, kills=0, seed=1, database_url=database_url, own_broker=False))
    assert report.deliveries.adds_up
    assert not report.exact
    assert report.comparison.wrong == ("00001",)
    assert report.as_dict()["difference_dollars"] == "0.01"
    assert schemas(admin) == queues(sqs) == []


def test_a_worker_that_ends_by_itself_ends_the_run(
    database_url: str, aws: "LocalAws", admin: Engine, sqs: "SQSClient", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_place, "upgrade_database", lambda *_, **__: None)  # so the workers find no tables
    monkeypatch.setattr(demo_run, "_COUNT", demo_run.text("SELECT 0"))
    with pytest.raises(TxboxError, match=r"worker \d+ ended by itself with status 1: .*processed_message"):
        run_demo(Plan(purchases=50, workers=2, kills=0, seed=1, database_url=database_url, own_broker=False))
    assert schemas(admin) == []
    assert queues(sqs) == []


def test_a_run_that_stands_still_ends(database_url: str, aws: "LocalAws", monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_run, "STALL_SECONDS", 0.5)
    monkeypatch.setattr(demo_run, "_COUNT", demo_run.text("SELECT 7"))
    with pytest.raises(TxboxError, match=r"no progress for 0\.5 s at 7 of 50 purchases"):
        run_demo(Plan(purchases=50, workers=2, kills=0, seed=1, database_url=database_url, own_broker=False))


# --- it leaves nothing behind ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_however_it_ends_nothing_keeps_running(on_its_own: None, number: signal.Signals, status: int) -> None:
    with Running(*DEMO, "--purchases", "5000") as running:
        running.says("processing")
        demo = psutil.Process(running.process.pid)
        # keeper and server of both, and workers
        wait_until(lambda: len(demo.children(recursive=True)) > 6, "workers run")
        processes = demo.children(recursive=True)
        running.signal(number)
        assert running.wait() == status
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert alive == []
    if status > 0:
        assert running.err[-1] == "txbox: interrupted\n"


@pytest.fixture
def demo_here(database_url: str, aws: "LocalAws") -> Callable[..., Running]:
    """Run the demo as a process on the session's own servers."""

    def start(*arguments: str, **options: Any) -> Running:
        return Running(*DEMO, "--url", database_url, *arguments, **options)

    return start


def test_an_interrupt_leaves_a_database_and_a_queue_of_ones_own_clean(
    demo_here: Callable[..., Running], admin: Engine, sqs: "SQSClient", tmp_path: Path
) -> None:
    with demo_here("--purchases", "5000", env={"TMPDIR": str(tmp_path)}) as running:
        running.says("processing")
        assert len(schemas(admin)) == len(queues(sqs)) == len(list(tmp_path.iterdir())) == 1
        running.signal(signal.SIGINT)
        assert running.wait() == 130
    assert schemas(admin) == []
    assert queues(sqs) == []
    assert list(tmp_path.iterdir()) == []


def test_keep_keeps_them(demo_here: Callable[..., Running], admin: Engine, sqs: "SQSClient", database_url: str) -> None:
    with demo_here("--purchases", "60", "--kills", "0", "--keep") as running:
        assert running.wait() == 0
    (schema,), (queue,) = schemas(admin), queues(sqs)
    assert f"kept: schema {schema}, queue {queue}\n" in running.out
    ended = run_process("status", "--url", database_url, "--schema", schema, "--queue", queue, "--json")
    assert json.loads(ended.out)["inbox_rows"] == 60
    with admin.begin() as connection:
        connection.exec_driver_sql(f"DROP SCHEMA {schema} CASCADE")
    sqs.delete_queue(QueueUrl=queue)
