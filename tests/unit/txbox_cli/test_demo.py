"""The command around the run: what it plans, what it shows on the way, and its exit status."""

import io
import json
import re
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from support.program import Ended
from txbox import TxboxError
from txbox_cli.commands import demo as command
from txbox_demo import run as demo_run
from txbox_demo.checker import CHAIN, DemoReport
from txbox_demo.run import Plan
from txbox_demo.sandbox import Progress
from txbox_spark.runtime import java as spark_java

Txbox = Callable[..., Ended]
OnProgress = Callable[[Progress], None]


def reports(report: DemoReport) -> Callable[..., DemoReport]:
    """A run that ends with this report, and gives it out while everything is still there."""

    def run(_: Plan, _on_progress: OnProgress, *, on_report: Callable[[DemoReport], None], **__: object) -> DemoReport:
        on_report(report)
        return report

    return run


@pytest.fixture(autouse=True)
def _nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_SQS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def planned(txbox: Txbox, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Plan]:
    """Return what the command would run, because no test reaches AWS: planned(*arguments)."""

    def plan(*arguments: str) -> Plan:
        plans: list[Plan] = []

        def keep(plan: Plan, _: OnProgress, **__: object) -> DemoReport:
            plans.append(plan)
            raise TxboxError("planned, and not run")

        monkeypatch.setattr(demo_run, "run_demo", keep)
        txbox("demo", *arguments).failed_in_one_line(1, "planned, and not run")
        return plans[0]

    return plan


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
    arguments: list[str],
    variable: str | None,
    own_broker: bool,
    planned: Callable[..., Plan],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable:
        monkeypatch.setenv(variable, "http://127.0.0.1:1")
    assert planned("--without-spark", *arguments).own_broker is own_broker


def test_a_terminal_shows_the_stages_and_four_bars(txbox: Txbox, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    terminal = Console(file=shown, force_terminal=True, width=120, color_system=None)

    def progresses(_: Plan, on_progress: OnProgress, **__: object) -> DemoReport:
        on_progress(Progress(stage="starting servers"))
        on_progress(Progress("processing", placed=200, billed=150, notified=140, killed=3))
        on_progress(Progress("processing", placed=400, billed=350, notified=330, killed=7))
        raise TxboxError("far enough")

    monkeypatch.setattr(command, "plain_console", lambda **_: terminal)
    monkeypatch.setattr(demo_run, "run_demo", progresses)
    txbox("demo", "--without-spark", "--purchases", "600", "--kills", "12").failed_in_one_line(1, "far enough")
    assert shown.getvalue().count("starting servers …") == 1
    assert shown.getvalue().count("processing …") == 1
    bars = [
        ("placed", "400/600"),
        ("billed", "350/600"),
        ("notified", "330/600"),
        ("killed", "7/12"),
    ]
    for name, count in bars:
        assert re.search(rf"\b{name} .* {count} ", shown.getvalue()), name


NOTHING: dict[str, list[str]] = {what: [] for what in CHAIN}
RIGHT = DemoReport(
    wrong=NOTHING,
    figures={
        "orders": (1_003, "committed"),
        "mails": (1_006, "accepted"),
        "mailed once": (1_000, "one mail"),
        "mailed again": (0, "nothing can know"),
    },
    cents={"by the file": 117700, "in the accounts": 117700, "difference": 0},
    kills={"relay": {"between send and settle": 2, "anywhere": 1}, "shop": {}},
    seconds=1.0,
)


@pytest.mark.parametrize("what", CHAIN)
def test_whatever_is_wrong_is_said_and_is_a_failure(
    what: str, txbox: Txbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = replace(RIGHT, wrong=NOTHING | {what: ["a", "b", "c", "d"]})
    monkeypatch.setattr(demo_run, "run_demo", reports(report))
    ended = txbox("demo", "--without-spark", "--purchases", "1", "--json", str(tmp_path / "figures.json"))
    assert ended.status == 1
    assert f"WRONG: {what.upper()}: 4, such as a, b, c\n" in ended.out
    assert ("THE ACCOUNTS ARE WRONG" in ended.out) == (what == "accounts")
    assert ("THE NOTIFICATIONS ARE WRONG" in ended.out) == what.startswith("mails")
    assert ended.out.splitlines()[-1].startswith("NOT EXACT: ")
    assert "\nEXACT" not in ended.out
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert (figures["exact"], figures["wrong"][what]) == (False, ["a", "b", "c", "d"])


def test_a_spark_stage_that_is_wrong_is_a_failure(txbox: Txbox, monkeypatch: pytest.MonkeyPatch) -> None:
    act = replace(RIGHT, wrong={"accounts": ["00001"]}, figures={"read by Spark": (3, "writer")}, kills={})
    monkeypatch.setattr(demo_run, "run_demo", reports(replace(RIGHT, spark_stage=act)))
    ended = txbox("demo", "--without-spark", "--purchases", "1")
    assert ended.status == 1
    _, shown = ended.out.split("\nfinal stage: ")
    assert "THE ACCOUNTS ARE WRONG; 1 s" in shown
    assert "WRONG: ACCOUNTS: 1, such as 00001" in shown


def test_a_run_in_which_all_is_well_is_a_success(txbox: Txbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_run, "run_demo", reports(RIGHT))
    ended = txbox("demo", "--without-spark", "--purchases", "1")
    assert ended.status == 0
    first, *_, verdict, following = ended.out.splitlines()
    assert first == "every customer is right to the cent, and was notified of every purchase: of 1,000 once; 1 s"
    assert verdict == "EXACT: nothing was lost, and nothing was applied twice; processes killed: 3"
    assert following.startswith("next: `txbox dev` ")
    assert re.search(r"^ *orders +1,003 +committed", ended.out, re.MULTILINE)
    assert re.search(r"^ *kills: relay +3 +2 between send and settle, 1 anywhere", ended.out, re.MULTILINE)
    assert re.search(r"in the accounts \$1,177\.00,", ended.out, re.MULTILINE)
    assert "WRONG" not in ended.out
    assert "kept: " not in ended.out


def test_mails_that_came_twice_where_it_cannot_be_known_are_said_and_are_no_failure(
    txbox: Txbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = RIGHT.figures | {"mailed once": (997, "one mail"), "mailed again": (3, "nothing can know")}
    monkeypatch.setattr(demo_run, "run_demo", reports(replace(RIGHT, figures=figures, kept="schema x, queues y z")))
    ended = txbox("demo", "--without-spark", "--purchases", "1")
    assert ended.status == 0
    assert "notified of every purchase: of 997 once, of 3 again, as it cannot be known; 1 s" in ended.out
    assert "\nkept: schema x, queues y z\n" in ended.out


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("java", "Spark needs a JDK 17 or newer, and there is no java"),
        ("pyspark", "the final stage needs pyspark: pip install '.[spark]'"),
        ("py4j", "the final stage needs py4j: pip install '.[spark]'"),
        ("pyarrow", "the final stage needs pyarrow: pip install '.[spark]'"),
    ],
)
def test_what_the_spark_stage_lacks_is_said_before_the_work(
    missing: str, said: str, txbox: Txbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing == "java":
        monkeypatch.setenv("PATH", "")
        monkeypatch.delenv("JAVA_HOME", raising=False)
        monkeypatch.setattr(spark_java, "find_spec", lambda name: None)
    else:
        monkeypatch.setattr(command, "find_spec", lambda name: None if name == missing else object())
    monkeypatch.setattr(demo_run, "run_demo", lambda *_, **__: pytest.fail("it began"))
    txbox("demo").failed_in_one_line(1, said, "--without-spark")


def test_the_spark_stage_is_part_of_the_demo_unless_it_is_left_out(planned: Callable[..., Plan]) -> None:
    assert planned().spark_stage
    assert not planned("--without-spark").spark_stage


def test_a_small_run_has_fewer_kills(planned: Callable[..., Plan]) -> None:
    runs = [(), ("--purchases", "149"), ("--purchases", "149", "--kills", "30")]
    assert [planned("--without-spark", *arguments).kills for arguments in runs] == [24, 2, 30]


def test_in_a_terminal_the_dashboard_stays_until_it_is_interrupted(
    txbox: Txbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted = threading.Event()
    stayed: list[bool] = []

    def interrupt() -> None:
        interrupted.set()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def run(_: Plan, _on_progress: OnProgress, *, on_report: Callable[[DemoReport], None], **__: object) -> DemoReport:
        timer = threading.Timer(0.2, interrupt)
        timer.start()
        on_report(RIGHT)
        stayed.append(interrupted.is_set())
        timer.cancel()
        return RIGHT

    monkeypatch.setattr(demo_run, "run_demo", run)
    monkeypatch.setattr(command.sys.stdin, "isatty", lambda: True, raising=False)
    ended = txbox("demo", "--without-spark", "--dashboard")
    assert (ended.status, stayed) == (0, [True])
    assert "stays until Ctrl-C" in ended.err
