"""The command around the run: what it plans, what it shows on the way, and its exit status."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from support.program import Ended
from txbox import TxboxError
from txbox_workers.cli import demo as command
from txbox_workers.demo import run as demo_run
from txbox_workers.demo.accounting import Comparison, Deliveries
from txbox_workers.demo.crew import Kills
from txbox_workers.demo.publisher import Sent
from txbox_workers.demo.run import Plan, Progress, Report

Txbox = Callable[..., Ended]
OnProgress = Callable[[Progress], None]


@pytest.fixture(autouse=True)
def _nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_SQS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("arguments", "variable", "own_broker"),
    [
        ([], None, True),
        (["--aws"], None, False),
        ([], "AWS_ENDPOINT_URL", False),
        ([], "AWS_ENDPOINT_URL_SQS", False),
    ],
)
def test_which_sqs_it_leads_to(
    arguments: list[str], variable: str | None, own_broker: bool, txbox: Txbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[Plan] = []

    def planned(plan: Plan, _: OnProgress) -> Report:
        plans.append(plan)
        raise TxboxError("planned, and not run")

    monkeypatch.setattr(demo_run, "run_demo", planned)  # because no test reaches AWS
    if variable:
        monkeypatch.setenv(variable, "http://127.0.0.1:1")
    txbox("demo", "--without-spark", *arguments).failed_in_one_line(1, "planned, and not run")
    (plan,) = plans
    assert plan.own_broker is own_broker


def test_a_terminal_shows_the_stages_and_three_bars(txbox: Txbox, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    terminal = Console(file=shown, force_terminal=True, width=120, color_system=None)

    def progresses(_: Plan, on_progress: OnProgress) -> Report:
        on_progress(Progress(stage="starting servers"))
        on_progress(Progress(stage="processing", sent=200, processed=150, kills=3))
        on_progress(Progress(stage="processing", sent=400, processed=350, kills=7))
        raise TxboxError("far enough")

    monkeypatch.setattr(command, "plain_console", lambda **_: terminal)
    monkeypatch.setattr(demo_run, "run_demo", progresses)
    txbox("demo", "--without-spark", "--purchases", "600", "--kills", "12").failed_in_one_line(1, "far enough")
    assert shown.getvalue().count("starting servers …") == 1
    assert shown.getvalue().count("processing …") == 1
    for name, count in [("sent", "400/600"), ("processed", "350/600"), ("workers killed", "7/12")]:
        assert re.search(rf"\b{name} .* {count} ", shown.getvalue()), name


def test_deliveries_that_do_not_add_up_are_a_failure_though_every_customer_is_right(
    txbox: Txbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def reports(plan: Plan, _: OnProgress) -> Report:
        return Report(
            plan=plan,
            sent=Sent(purchases=1, resent=1),
            deliveries=Deliveries(received=2, processed=1, duplicates=0, failed=0, in_flight=0, contradictions=()),
            kills=Kills(),
            workers_started=2,
            comparison=Comparison(customers=1, wrong=(), expected_cents=1177, found_cents=1177, difference_cents=0),
            dead=0,
            seconds=1.0,
            schema="txbox_demo_0",
            queue_url="q",
        )

    monkeypatch.setattr(demo_run, "run_demo", reports)
    ended = txbox("demo", "--without-spark", "--purchases", "1", "--json", str(tmp_path / "figures.json"))
    assert ended.status == 1
    assert "DOES NOT ADD UP: deliveries 2 = 1 processed + 0 duplicates" in ended.out
    assert json.loads((tmp_path / "figures.json").read_text())["exact"] is False


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("java", "Spark needs a JDK 17 or newer, and there is no java"),
        ("pyspark", "the last act needs pyspark: pip install 'txbox[spark]'"),
        ("pyarrow", "the last act needs pyarrow: pip install 'txbox[spark]'"),
    ],
)
def test_what_the_last_act_lacks_is_said_before_the_work(
    missing: str, said: str, txbox: Txbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing == "java":
        monkeypatch.setenv("PATH", "")
        monkeypatch.delenv("JAVA_HOME", raising=False)
    else:
        monkeypatch.setattr(command, "find_spec", lambda name: None if name == missing else object())
    monkeypatch.setattr(demo_run, "run_demo", lambda *_: pytest.fail("it began"))
    txbox("demo").failed_in_one_line(1, said, "--without-spark")


def test_the_last_act_is_part_of_the_demo_unless_it_is_left_out(txbox: Txbox, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[bool] = []

    def plans(plan: Plan, _: OnProgress) -> Report:
        planned.append(plan.last_act)
        raise TxboxError("planned, and not run")

    monkeypatch.setattr(demo_run, "run_demo", plans)
    txbox("demo")
    txbox("demo", "--without-spark")
    assert planned == [True, False]
