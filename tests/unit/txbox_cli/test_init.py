"""`txbox init`: what it writes, what it keeps, and what it says; tests/acceptance/test_init.py runs what it writes."""

import re
import resource
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.program import Ended
from support.program import txbox as run_process
from txbox_cli.commands.init import KINDS, TEMPLATES

Txbox = Callable[..., Ended]

REPOSITORY = Path(__file__).parents[3]

WRITTEN = {
    "worker": {"billing.py", "send.py", "settings.py", "test_billing.py"},
    "fastapi": {"app.py", "send.py", "settings.py", "test_app.py"},
    "django": {
        *("manage.py", "send.py", "billing/__init__.py", "billing/models.py", "billing/settings.py"),
        *("billing/tests.py", "billing/worker.py"),
    },
    "lambda": {"app.py", "billing.py", "event.json", "send.py", "settings.py", "test_app.py"},
}


def options(kind: str) -> list[str]:
    return [] if kind == "worker" else [f"--{kind}"]


def files(directory: Path) -> dict[str, str]:
    return {path.relative_to(directory).as_posix(): path.read_text() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory, in which the program runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
def test_it_writes_its_files_and_says_so(kind: str, txbox: Txbox, here: Path) -> None:
    ended = txbox("init", *options(kind))
    assert (ended.status, ended.err) == (0, "")
    assert set(files(here)) == WRITTEN[kind]
    assert set(re.findall(r"^wrote (\S+)$", ended.out, re.M)) == WRITTEN[kind]
    assert "kept" not in ended.out


@pytest.mark.parametrize("kind", KINDS)
def test_its_last_lines_are_three_commands_and_what_they_need(kind: str, txbox: Txbox, here: Path) -> None:
    lines = txbox("init", *options(kind), "my shop").out.splitlines()
    commands = [line.strip() for line in lines if line.startswith("  ")]
    assert commands == [f"cd 'my shop' && {command}" for command in KINDS[kind].commands]
    needs = re.fullmatch(
        r"They need: pip install '\.\[(.+)\]' in a clone of txbox(?:; and pip install (.+))?", lines[-1]
    )
    assert needs is not None
    pyproject = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    assert set(needs[1].split(",")) <= set(pyproject["project"]["optional-dependencies"])
    known = {re.split(r"\W", each)[0] for each in pyproject["dependency-groups"]["test"]}
    assert set((needs[2] or "").split()) <= known


def test_in_this_directory_the_commands_change_no_directory(txbox: Txbox, here: Path) -> None:
    assert not re.search(r"^ +cd ", txbox("init").out, re.M)


def test_without_tables_where_djangos_migrations_make_them(txbox: Txbox, here: Path) -> None:
    assert "\n  txbox dev --no-tables --queue purchases > dev.env\n" in txbox("init", "--django").out
    assert "--no-tables" not in "".join(txbox("init", *options(kind)).out for kind in KINDS if kind != "django")


def test_a_directory_is_made_if_it_is_missing(txbox: Txbox, here: Path) -> None:
    assert txbox("init", "services/billing").status == 0
    assert set(files(here / "services" / "billing")) == WRITTEN["worker"]


def test_what_is_there_is_kept(txbox: Txbox, here: Path) -> None:
    mine = {"billing.py": "MINE = 1\n", "README.md": "mine\n"}
    for name, text in mine.items():
        (here / name).write_text(text)
    (here / "settings.py").mkdir()
    ended = txbox("init")
    assert ended.status == 0
    assert "kept billing.py (it is there already)\n" in ended.out
    assert "kept settings.py (it is there already)\n" in ended.out
    assert set(re.findall(r"^wrote (\S+)$", ended.out, re.M)) == {"send.py", "test_billing.py"}
    assert files(here).items() > mine.items()
    before = files(here)
    assert "wrote" not in txbox("init").out
    assert files(here) == before


@pytest.mark.parametrize("exists", [True, False])
def test_a_symbolic_link_is_kept_and_not_followed(exists: bool, txbox: Txbox, here: Path) -> None:
    (here / "shop").mkdir()
    outside = here / "outside.py"
    if exists:
        outside.write_text("MINE = 1\n")
    (here / "shop" / "billing.py").symlink_to(outside)
    assert "kept billing.py (it is there already)\n" in txbox("init", "shop").out
    assert outside.exists() is exists
    assert not exists or outside.read_text() == "MINE = 1\n"


@pytest.mark.parametrize("target", ["../outside", "../missing"])
def test_a_link_that_leads_a_folder_out_is_refused_before_anything_is_written(
    target: str, txbox: Txbox, here: Path
) -> None:
    for name in ("shop", "outside"):
        (here / name).mkdir()
    (here / "shop" / "billing").symlink_to(target)
    txbox("init", "--django", "shop").failed_in_one_line(
        1, "shop/billing is a symbolic link that leads out of shop; rename it, or remove it"
    )
    assert files(here) == {}
    assert not (here / "missing").exists()


def test_a_link_that_stays_inside_and_a_linked_directory_are_fine(txbox: Txbox, here: Path) -> None:
    (here / "shop" / "apps").mkdir(parents=True)
    (here / "shop" / "billing").symlink_to("apps")
    (here / "linked").symlink_to("shop")
    assert txbox("init", "--django", "linked").status == 0
    assert (here / "shop" / "apps" / "models.py").is_file()


def test_what_appears_meanwhile_is_kept(txbox: Txbox, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a look and the writing, somebody else writes the file."""
    opened = Path.open

    def beaten(path: Path, *arguments: Any, **options: Any) -> Any:
        if (path.name, *arguments) == ("send.py", "xb"):
            path.write_bytes(b"MINE = 1\n")
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", beaten)
    assert "kept send.py" in txbox("init").out
    assert files(here)["send.py"] == "MINE = 1\n"


def test_a_directory_that_cannot_be_made_or_written_is_one_line(txbox: Txbox, here: Path) -> None:
    (here / "file").write_text("")
    txbox("init", "file/shop").failed_in_one_line(1, "cannot write file/shop: Not a directory; name a directory in")
    (here / "billing").write_text("mine")
    txbox("init", "--django").failed_in_one_line(1, "cannot write billing: File exists; name a directory in which")
    (here / "loop").symlink_to("loop")
    txbox("init", "loop").failed_in_one_line(1, "cannot write loop: ")
    txbox("init", "file").failed_in_one_line(2, "is a file")


def test_half_of_a_file_is_not_left_behind(here: Path) -> None:
    def hardly_any_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    ended = run_process("init", preexec_fn=hardly_any_room)
    ended.failed_in_one_line(1, "cannot write billing.py: File too large")
    assert files(here) == {}


def test_two_kinds_at_once_are_a_wrong_usage(txbox: Txbox, here: Path) -> None:
    txbox("init", "--lambda", "--fastapi").failed_in_one_line(2, "--fastapi and --lambda write different services")
    assert files(here) == {}


def test_no_template_is_taken_for_a_module_or_a_test_of_ours() -> None:
    assert {path.suffix for path in TEMPLATES.rglob("*") if path.is_file()} == {".tmpl"}
    assert {path.name for path in TEMPLATES.iterdir()} == set(KINDS)
