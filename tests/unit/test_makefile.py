"""`make` says in one line what is missing on a machine, and what installs it; what one asks for comes last."""

import re
import runpy
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

Make = Callable[..., subprocess.CompletedProcess[str]]
Stub = Callable[[str, str], None]


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """The only folder on the PATH: what the recipes need, and what a test puts there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    awk = shutil.which("awk")
    assert awk
    (folder / "awk").symlink_to(awk)
    return folder


@pytest.fixture
def stub(programs: Path) -> Stub:
    """Put a program on the PATH: stub(name, script)."""

    def write(name: str, script: str) -> None:
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)

    return write


@pytest.fixture
def make(tmp_path: Path, programs: Path) -> Make:
    """Run make on a copy of the Makefile, where nothing is set up."""
    program = shutil.which("make")
    assert program
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(REPOSITORY / name, tmp_path)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [program, *arguments],
            cwd=tmp_path,
            env={"PATH": str(programs)},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    return run


def failed_in_one_line(ended: subprocess.CompletedProcess[str], line: str) -> None:
    assert ended.returncode != 0
    assert ended.stdout == ""
    said = ended.stderr.splitlines()
    # The last line is make's own, about the target that failed.
    assert (said[:-1], said[-1].startswith("make: ***")) == ([line], True), ended.stderr


def test_a_python_without_venv_is_named(make: Make, stub: Stub, tmp_path: Path) -> None:
    stub("python3.13", """case "$2" in *ensurepip*) echo ModuleNotFoundError >&2; exit 1;; esac""")
    failed_in_one_line(
        make("setup", "PYTHON=python3.13"),
        "python3.13 has no venv module; install it (Debian and Ubuntu: apt-get install python3-venv)",
    )
    assert not (tmp_path / ".venv").exists()


def test_a_python_that_is_too_old_is_named(make: Make, stub: Stub) -> None:
    stub("python3", """case "$2" in *version_info*) exit 1;; esac""")
    failed_in_one_line(
        make("setup"), "txbox needs Python 3.11 or newer as python3; name another one: make PYTHON=python3.12 ..."
    )


@pytest.fixture
def take_turns(programs: Path, stub: Stub, tmp_path: Path) -> Make:
    """Run tests/pythons/run.sh on a machine that has no Python but make's, 3.11: take_turns("PYTHON_TURN=3.14")."""
    for name in ("bash", "dirname", "realpath"):
        (programs / name).symlink_to(shutil.which(name) or "")
    stub("python", """case "$2" in *base_prefix*) echo /nowhere/3.11 ;; *) echo 3.11 ;; esac""")
    stub("date", "echo 002")

    def run(*settings: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [REPOSITORY / "tests/pythons/run.sh", programs / "python", tmp_path / "environment"],
            env={"PATH": str(programs), **dict(setting.split("=", 1) for setting in settings)},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    return run


@pytest.mark.parametrize(("asked_for", "status"), [([], 0), (["PYTHON_TURN=3.14"], 1), (["PYTHON_TURN=3.9"], 1)])
def test_a_python_that_cannot_be_had_is_told_and_is_an_error_if_it_was_asked_for(
    take_turns: Make, asked_for: list[str], status: int
) -> None:
    ended = take_turns(*asked_for)
    assert ended.returncode == status
    if asked_for != ["PYTHON_TURN=3.9"]:
        assert ended.stdout.endswith("this machine has no Python 3.14; its turn is left out\n")
        assert "this is no Debian to get it from" in ended.stderr


def test_the_next_python_has_the_turn_of_one_that_cannot_be_had(take_turns: Make, stub: Stub) -> None:
    stub("python3.12", """case "$2" in "import venv") exit 0 ;; *) echo "python3.12 $*"; exit 7 ;; esac""")
    ended = take_turns()
    assert ended.returncode == 7
    turn, left_out, next_turn, begun = ended.stdout.splitlines()
    assert turn.startswith("Python 3.14 and SQLAlchemy 2.0 have their turn, of Python 3.12 3.14")
    assert left_out == "this machine has no Python 3.14; its turn is left out"
    assert next_turn.startswith("Python 3.12 and SQLAlchemy 2.0 have their turn")
    assert begun.startswith("python3.12 -m venv ")


def test_tests_run_side_by_side_unless_one_asks_for_one_process(make: Make) -> None:
    ended = make("--dry-run", "test", "TESTS=-n0 tests/unit")
    assert ended.returncode == 0, ended.stderr
    program, *arguments = shlex.split(next(line for line in ended.stdout.splitlines() if "pytest" in line))
    assert program == ".venv/bin/pytest"
    assert arguments[:4] == ["-n", "3", "--dist", "loadgroup"]
    assert arguments[-2:] == ["-n0", "tests/unit"]


def test_a_single_file_runs_in_one_process(make: Make) -> None:
    ended = make("--dry-run", "test", "TESTS=tests/unit/test_docs.py")
    _, *arguments = shlex.split(next(line for line in ended.stdout.splitlines() if "pytest" in line))
    assert arguments[:2] == ["-n", "0"]
    assert arguments[-1] == "tests/unit/test_docs.py"


@pytest.mark.parametrize(("day", "target"), [("008", "test-oldest"), ("009", "test-pythons")])
def test_versions_have_their_turn_by_days(make: Make, stub: Stub, day: str, target: str) -> None:
    stub("date", f"echo {day}")
    ended = make("--dry-run", "test-versions")
    assert target in ended.stdout


def test_every_target_of_ci_has_a_budget_and_all_of_them_fit_into_the_whole() -> None:
    targets = runpy.run_path(str(REPOSITORY / ".ci/targets.py"))
    stages, budgets = targets["STAGES"], targets["BUDGET_SECONDS"]
    assert sorted(target for rows in stages for row in rows for target in row) == sorted(budgets)
    assert set(budgets) <= set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    longest = sum(max(sum(budgets[target] for target in row) for row in rows) for rows in stages)
    assert longest <= targets["WHOLE_SECONDS"]


def test_the_oldest_versions_that_are_tested_are_those_that_are_admitted() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], project["optional-dependencies"]["spark"][0]]
    admitted = {}
    for one in wanted:
        name, oldest = re.findall(r"^(\w+).*?>=([0-9.]+)", one)[0]
        admitted[name.replace("pyspark", "spark").upper()] = oldest
    tested = dict(re.findall(r"^([A-Z]+)_OLDEST := ([0-9.]+)$", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    assert {name: version.removesuffix(".0") for name, version in tested.items()} == admitted


def test_the_tests_that_are_named_are_there(tmp_path: Path) -> None:
    """Side by side, pytest passes over a path that is missing, and all others with it."""
    lists = tmp_path / "lists.mk"
    names = "$(CONTAINER_TESTS) $(OLDEST_TESTS) $(PYTHONS_TESTS) $(SPARK_TESTS)"
    lists.write_text(f"include Makefile\nnamed:\n\t@echo {names}\n")
    command = ["make", "--silent", "-f", lists, "named"]
    printed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True)
    named = printed.stdout.split()
    assert len(named) > 40
    assert [path for path in named if not (REPOSITORY / path).exists()] == []


def test_an_environment_that_a_reader_has_made_gets_what_it_lacks(make: Make, tmp_path: Path) -> None:
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").touch()
    planned = make("-n", "demo").stdout
    assert "venv --clear" not in planned
    assert planned.index("install -c constraints.txt uv") < planned.index("-e '.[aws,cli")
