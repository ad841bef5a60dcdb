"""The command around the run: what it plans, what it shows on the way, and its exit status."""

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from support.demo_reports import COMPLETE, NOTICES, RIGHT
from support.program import Ended
from txbox import TxboxError
from txbox_cli.commands import demo as command
from txbox_demo import run as demo_run
from txbox_demo.accounting import Sends
from txbox_demo.crew import ROLES
from txbox_demo.plan import Plan, Progress
from txbox_demo.report import Report
from txbox_demo.standing import Standing
from txbox_spark.runtime import java as spark_java

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


def test_a_terminal_shows_the_stages_and_four_bars(txbox: Txbox, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    terminal = Console(file=shown, force_terminal=True, width=120, color_system=None)

    def progresses(_: Plan, on_progress: OnProgress) -> Report:
        on_progress(Progress(stage="starting servers"))
        on_progress(Progress("processing", Standing(placed=200, billed=150, notified=140), kills=3))
        on_progress(Progress("processing", Standing(placed=400, billed=350, notified=330), kills=7))
        raise TxboxError("far enough")

    monkeypatch.setattr(command, "plain_console", lambda **_: terminal)
    monkeypatch.setattr(demo_run, "run_demo", progresses)
    txbox("demo", "--without-spark", "--purchases", "600", "--kills", "12").failed_in_one_line(1, "far enough")
    assert shown.getvalue().count("starting servers …") == 1
    assert shown.getvalue().count("processing …") == 1
    bars = [
        ("orders placed", "400/600"),
        ("billed", "350/600"),
        ("notified", "330/600"),
        ("processes killed", "7/12"),
    ]
    for name, count in bars:
        assert re.search(rf"\b{name} .* {count} ", shown.getvalue()), name


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"deliveries": {"billing": replace(COMPLETE, duplicates=0), "notification": COMPLETE}},
            "DOES NOT ADD UP: billing: deliveries 2 = 1 processed + 0 duplicates",
        ),
        ({"sends": Sends(3, 3, ("one too many",))}, "CONTRADICTION: relay: one too many"),
        ({"notices": replace(NOTICES, missing=("x", "y"))}, "2 missing, 0 repeated, 0 wrong"),
        ({"notices": replace(NOTICES, repeated=("x",))}, "0 missing, 1 repeated, 0 wrong"),
        (
            {"notices": replace(NOTICES, wrong=("x",), unsure_twice=1)},
            "every customer is right to the cent, THE NOTIFICATIONS ARE WRONG",
        ),
        ({"notices": replace(NOTICES, contradictions=("nobody sent it",))}, "CONTRADICTION: mails: nobody sent it"),
        ({"comparison": replace(RIGHT.comparison, wrong=("1",))}, "THE ACCOUNTS ARE WRONG, and was notified"),
    ],
)
def test_whatever_is_wrong_is_said_and_is_a_failure(
    changes: dict[str, Any], said: str, txbox: Txbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(demo_run, "run_demo", lambda *_: replace(RIGHT, **changes))
    ended = txbox("demo", "--without-spark", "--purchases", "1", "--json", str(tmp_path / "figures.json"))
    assert ended.status == 1
    assert said in ended.out
    assert ended.out.splitlines()[-1].startswith("NOT EXACT: ")
    assert "\nEXACT" not in ended.out
    assert json.loads((tmp_path / "figures.json").read_text())["exact"] is False


def test_a_run_in_which_all_is_well_is_a_success(txbox: Txbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_run, "run_demo", lambda *_: replace(RIGHT, kills={"relay": {"sent": 2, "anywhere": 1}}))
    ended = txbox("demo", "--without-spark", "--purchases", "1")
    assert ended.status == 0
    first, *_, verdict, following = ended.out.splitlines()
    assert first.startswith("every customer is right to the cent, and was notified of every purchase once; 1 s")
    assert verdict == "EXACT: nothing was lost, and nothing was applied twice; processes killed: 3"
    assert following.startswith("next: `txbox dev` ")
    assert re.search(r"^ *kills: relay +3 +2 between send and settle, 1 anywhere", ended.out, re.MULTILINE)
    assert re.search(r"^ *in the accounts +\$1,177\.00 ", ended.out, re.MULTILINE)
    assert "CONTRADICTION" not in ended.out
    assert "mailed twice" not in ended.out


UNSURE = replace(NOTICES, mails=1_003, once=997, refused=21, unsure=7, unsure_twice=3, unsure_once=4)


def test_mails_that_came_twice_where_nobody_can_know_are_said_and_are_no_failure(
    txbox: Txbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_run, "run_demo", lambda *_: replace(RIGHT, notices=UNSURE))
    ended = txbox("demo", "--without-spark", "--purchases", "1")
    assert ended.status == 0
    first, *_, verdict, _ = ended.out.splitlines()
    assert "right to the cent, and was notified of every purchase: of 997 once, of 3 twice; 1 s" in first
    assert verdict.startswith("EXACT: nothing was lost, and nothing was applied twice; processes killed: ")
    assert verdict.endswith("; mails sent twice: 3, as said above")
    said = (
        "\nmailed twice: 3, each worker killed or stalled between the mail and its completion: nobody can know; "
        "mailed once: 4, which looked the same to the next worker\n"
    )
    assert said in ended.out
    for name, figure in {"mails": "1,003", "mails refused": "21", "mailed once": "997", "unsure": "7"}.items():
        assert re.search(rf"^ *{name} +{figure} ", ended.out, re.MULTILINE), name


def test_mails_that_only_looked_so_are_said_too(txbox: Txbox, monkeypatch: pytest.MonkeyPatch) -> None:
    notices = replace(UNSURE, unsure_twice=0)
    monkeypatch.setattr(demo_run, "run_demo", lambda *_: replace(RIGHT, notices=notices))
    ended = txbox("demo", "--without-spark", "--purchases", "1")
    assert "\nmailed twice: 0; mailed once: 4, which looked the same to the next worker\n" in ended.out
    assert "notified of every purchase once; " in ended.out
    assert "mails sent twice" not in ended.out


@pytest.mark.parametrize(
    ("role", "words"),
    [
        ("billing", "0 between insert and commit, 1 between commit and ack, 2 anywhere, 3 before the transaction"),
        (
            "notification",
            (
                "0 between mail and completion, 1 between completion and ack, 2 anywhere, 3 between lease and mail, "
                "4 before the lease"
            ),
        ),
    ],
)
def test_where_processes_died_is_said_in_the_words_of_their_role(
    role: str, words: str, txbox: Txbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    (team,) = (one for one in ROLES if one.name == role)
    kills = {role: {moment: number for number, moment in enumerate(team.moments)}}
    monkeypatch.setattr(demo_run, "run_demo", lambda *_: replace(RIGHT, kills=kills))
    assert words in txbox("demo", "--without-spark", "--purchases", "1").out


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
        monkeypatch.setattr(spark_java, "find_spec", lambda name: None)
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
