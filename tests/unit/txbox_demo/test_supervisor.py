"""The supervisor: which processes are started, killed and replaced."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.broken_demo import idle_billing, take_place
from txbox import TxboxError
from txbox_demo import supervisor
from txbox_demo.processes import ROLES, DemoTask
from txbox_demo.run import Plan
from txbox_demo.sandbox import Progress
from txbox_demo.supervisor import SPARE, DemoSupervisor, Group

MakeTask = Callable[..., DemoTask]
NO_SANDBOX: Any = None  # only `drive` looks into it


@pytest.mark.parametrize("postgres", [False, True])
def test_all_kills_are_given_to_a_role(postgres: bool) -> None:
    for kills in range(40):
        groups = Plan(purchases=1000, workers=2, kills=kills, seed=1, postgres=postgres).groups()
        assert [group.name for group in groups] == [role for role in ROLES if role != "relay" or not postgres]
        assert sum(group.kills for group in groups) == kills
        assert min(group.kills for group in groups) >= 0


def test_with_the_default_every_role_dies_at_each_of_its_moments_within_its_work() -> None:
    for group in Plan(purchases=3000, workers=2, kills=24, seed=1).groups():
        assert group.kills >= len(ROLES[group.name][1]), group.name
        longest_life = group.messages / (group.kills * SPARE) * 1.5
        assert group.kills * longest_life < group.messages


def test_a_process_that_was_not_to_die_ends_the_run(
    make_task: MakeTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_place(monkeypatch, idle_billing)
    group = Group("billing", 1)
    its = DemoSupervisor([group], make_task(), NO_SANDBOX, tmp_path)
    its._tend(group)
    process, _ = group.running[0]
    process.kill()
    process.join(60)
    with pytest.raises(TxboxError, match=r"billing 1 ended by itself with status -9: its log is empty"):
        its._tend(group)


class Looks:
    """A sandbox in which each look shows the next of these."""

    def __init__(self, *looks: Progress) -> None:
        self.left = list(looks)

    def progress(self, stage: str, killed: int) -> Progress:
        return self.left.pop(0)


def test_nothing_is_given_up_after_a_single_look(
    make_task: MakeTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next look comes later the longer the last one took, and until then nothing new is known."""
    monkeypatch.setattr(supervisor, "LOST_SECONDS", 0.0)
    missed, waits, done = Progress("x", placed=50), Progress("x", placed=50, waiting=3), Progress("x", 0, 50, 50, 50)

    def drive(*looks: Progress) -> Progress:
        sandbox: Any = Looks(*looks)
        its = DemoSupervisor([], make_task(), sandbox, tmp_path)
        return its.drive("x", lambda _: None, is_ending=lambda: True, is_done=lambda now: now.notified == 50)

    assert drive(missed, waits, done) == done
    assert drive(missed, missed, done) == missed  # twice the same: lost
