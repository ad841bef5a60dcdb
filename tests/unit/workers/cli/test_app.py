"""What needs no server: arguments that cannot be meant, and the ways the program ends."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import txbox as library
from support.program import Ended
from txbox_workers.cli import app, status
from txbox_workers.cli.app import run

Txbox = Callable[..., Ended]

WRONG = [
    (["nosuch"], "No such command 'nosuch' (see `txbox --help`)"),
    (["status", "--nosuch"], "No such option: --nosuch"),
    (["status", "--url"], "requires an argument"),
    (["db"], "Missing command (see `txbox db --help`)"),
    (["dead-letters", "show"], "Missing argument"),
    (["dead-letters", "show", "seven"], "should be a valid integer"),
    (["dead-letters", "list", "--limit", "0"], "greater than or equal to 1"),
    (["dead-letters", "redrive"], "say which letters"),
    (["dead-letters", "redrive", "1", "--all"], "say which letters"),
    (["dead-letters", "redrive", "1", "--queue", "orders"], "--queue must be the URL of a queue"),
    (["db", "upgrade", "--to", "99"], "less than or equal to"),
    (["db", "downgrade", "--to", "0", "--url", "postgresql://u:hunter2@127.0.0.1:1/x"], "give --yes"),
    (["demo", "--purchases", "0"], "greater than or equal to 1"),
    (["demo", "--purchases", "many"], "should be a valid integer"),
    (["demo", "--workers", "1"], "greater than or equal to 2"),
    (["demo", "--keep"], "--keep needs --url"),
    (["demo", "--url", "not a URL"], "this is not a database URL"),
    (["demo", "--json", "/nowhere/at/all.json"], "cannot write /nowhere/at/all.json: No such file or directory"),
    (["dev", "--port", "99999"], "less than or equal to 65535"),
    (["dev", "--data", __file__], "is a file"),
    (["dev", "--queue", "no good"], "SQS allows letters"),
    (["--log-level", "LOUD", "status"], "--log-level must be one of DEBUG, INFO, WARNING, ERROR, not LOUD"),
    (["status"], "give --url or set TXBOX_DATABASE_URL"),
    (["status", "--url", "127.0.0.1"], "this is not a database URL; give postgresql://user:password@host"),
    (["status", "--url", "postgresql://u:hunter2@127.0.0.1:port/x"], "this is not a database URL"),
    (["status", "--url", "mysql://u:hunter2@127.0.0.1/x"], "a database of kind mysql cannot be used"),
    (["status", "--url", "postgresql+asyncpg://u:hunter2@127.0.0.1/x"], "of kind postgresql+asyncpg cannot"),
    (["status", "--url", "postgresql://u:pass@word@127.0.0.1/x"], "in a password, write it as %40"),
    (["status", "--queue", "orders"], "--queue must be the URL of a queue, https://HOST/ACCOUNT/NAME, not 'orders'"),
    (["worker", "billing"], "'billing' is not of the form MODULE:NAME, such as billing:worker"),
    (["worker", "nosuch:worker"], "there is no module nosuch here"),
    (["worker", "json.nosuch:worker"], "there is no module json.nosuch here"),
    (["worker", "json:nosuch"], "module json has no nosuch"),
    (["worker", "json:__name__"], "is a str, not a worker or a function that returns one"),
    (["worker", "json:dumps", "--stop-seconds", "soon"], "should be a valid number"),
]


@pytest.mark.parametrize(("arguments", "fragment"), WRONG, ids=lambda value: " ".join(value)[:60])
def test_asked_wrongly_is_one_line_and_status_2(arguments: list[str], fragment: str, txbox: Txbox) -> None:
    txbox(*arguments).failed_in_one_line(2, fragment)
    txbox("--debug", *arguments).failed_with_traceback(2, fragment)
    txbox(*arguments, "--debug").failed_with_traceback(2, fragment)


MODULES = {
    "needs": ("import nosuchlibrary", "module needs failed: ModuleNotFoundError: No module named 'nosuchlibrary'"),
    "syntax": ("worker = = 3", "module syntax failed: SyntaxError: invalid syntax"),
    "leaves": ("raise SystemExit(3)", "module leaves failed: SystemExit: 3"),
    "reads": ("import os\nos.environ['NO_SUCH_VARIABLE']", "module reads failed: KeyError: 'NO_SUCH_VARIABLE'"),
    "raises": ("def worker():\n    raise ValueError('no\\nqueue')", "raises:worker() failed: ValueError: no queue"),
    "wants": ("def worker(url):\n    ...", "wants:worker() failed: TypeError: worker() missing 1 required"),
    "refuses": ("import txbox\ndef worker():\n    return txbox.Inbox('')", "Inbox.subscriber_id must be"),
    "connects": (
        "from sqlalchemy import create_engine\ncreate_engine('postgresql+psycopg://u:hunter2@127.0.0.1:1/x').connect()",
        "module connects failed: OperationalError",
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_what_a_module_raises_is_one_line(
    name: str, txbox: Txbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, fragment = MODULES[name]
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    txbox("worker", f"{name}:worker").failed_in_one_line(1, fragment)
    sys.modules.pop(name, None)
    txbox("--debug", "worker", f"{name}:worker").failed_with_traceback(1, fragment)
    sys.modules.pop(name, None)


def test_a_module_that_lacks_the_name_says_which_workers_it_has(
    txbox: Txbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "has_workers.py").write_text(
        "from sqlalchemy import create_engine\n"
        "from txbox import Inbox\n"
        "from txbox_workers.memory import MemorySource\n"
        "from txbox_workers.worker import Worker\n"
        "engine = create_engine('postgresql+psycopg://127.0.0.1:1/x')\n"
        "refunds, orders = [Worker(MemorySource(), inbox=Inbox('b'), engine=engine, handler=print) for _ in '12']\n"
        "def nothing():\n    pass\n"
    )
    monkeypatch.chdir(tmp_path)
    txbox("worker", "has_workers:worker").failed_in_one_line(2, "has no worker; it has orders, refunds")
    txbox("worker", "has_workers:nothing").failed_in_one_line(2, "is a NoneType, not a worker")


def test_without_arguments_it_helps(txbox: Txbox) -> None:
    for ended in (txbox(), txbox("--help"), txbox("-h")):
        assert (ended.status, ended.err) == (0, "")
        for command in ("demo", "dev", "worker", "status", "db", "dead-letters"):
            assert command in ended.out


def test_the_version(txbox: Txbox) -> None:
    assert txbox("--version").out == f"txbox {library.__version__}\n"


def test_what_was_not_foreseen_is_one_line_too(txbox: Txbox, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("postgresql://u:hunter2@127.0.0.1/x divided\nby zero")

    monkeypatch.setattr(status, "database", broken)
    txbox("status").failed_in_one_line(
        1, "ZeroDivisionError: postgresql://u:***@127.0.0.1/x divided by zero", "--debug"
    )
    txbox("status", "--debug").failed_with_traceback(1, "in broken")


@pytest.mark.parametrize("error", [KeyboardInterrupt, app.typer.Abort])
def test_an_interrupt_is_told_as_shells_do(
    error: type[BaseException], txbox: Txbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(status, "database", interrupted)
    txbox("status").failed_in_one_line(130, "interrupted")


def test_the_script_and_the_module_are_the_same_program() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "txbox_workers", "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == f"txbox {library.__version__}\n"


@pytest.mark.parametrize("missing", ["typer", "rich", "pydantic_settings", "pydantic"])
def test_without_the_extra_it_says_what_to_install(missing: str) -> None:
    program = f"import sys; sys.modules[{missing!r}] = None; from txbox_workers.cli import main; main()"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    Ended(ended.returncode, ended.stdout, ended.stderr).failed_in_one_line(1, "pip install 'txbox[cli]'")


def test_the_programs_own_click_is_not_needed() -> None:
    program = (
        "import sys; sys.modules['click'] = None; from txbox_workers.cli.app import run; sys.exit(run(['nosuch']))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    Ended(ended.returncode, ended.stdout, ended.stderr).failed_in_one_line(2, "No such command")


def test_run_takes_the_arguments_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["txbox", "--version"])
    assert run() == 0
