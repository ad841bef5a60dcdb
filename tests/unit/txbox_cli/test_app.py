"""What needs no server: arguments that cannot be meant, and the ways the program ends."""

import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import txbox as library
from support.program import Ended, own_module
from txbox.instrumentation.json_logs import JsonFormatter
from txbox_cli import app, settings
from txbox_cli.settings import Settings

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
    (["demo", "--without-spark", "--postgres", "--aws"], "--postgres is without SQS"),
    (["demo", "--url", "not a URL"], "this is not a database URL"),
    (["demo", "--json", "/nowhere/at/all.json"], "cannot write /nowhere/at/all.json: No such file or directory"),
    (["dev", "--port", "99999"], "less than or equal to 65535"),
    (["dev", "--data", __file__], "is a file"),
    (["dev", "--queue", "no good"], "SQS allows letters"),
    (["dev", "--queue", "a-b", "--queue", "a_b"], "a-b and a_b would both be QUEUE_URL_A_B"),
    (["--log-level", "LOUD", "status"], "--log-level must be one of DEBUG, INFO, WARNING, ERROR, not LOUD"),
    (["status", "--log-level", "LOUD"], "--log-level must be one of DEBUG, INFO, WARNING, ERROR, not LOUD"),
    (["db", "--log-level", "LOUD", "check"], "--log-level must be one of DEBUG, INFO, WARNING, ERROR, not LOUD"),
    (["worker", "json:dumps", "--log-level"], "'--log-level' requires an argument"),
    (["status"], "give --url or set TXBOX_DATABASE_URL"),
    (["status", "--url", "127.0.0.1"], "this is not a database URL; give postgresql://user:password@host"),
    (["status", "--url", "postgresql://u:hunter2@127.0.0.1:port/x"], "this is not a database URL"),
    (["status", "--url", "mysql://u:hunter2@127.0.0.1/x"], "mysql:// cannot be used: Postgres"),
    (["status", "--url", "postgresql+asyncpg://u:hunter2@127.0.0.1/x"], "postgresql+asyncpg:// cannot be used"),
    (["status", "--url", "postgresql://u:pass@word@127.0.0.1/x"], "in a password, write it as %40"),
    (["status", "--queue", "orders"], "--queue must be the URL of a queue, https://HOST/ACCOUNT/NAME, not 'orders'"),
    (["worker", "billing"], "'billing' is not of the form MODULE:NAME, such as billing:worker"),
    (["worker", "nosuch:worker"], "there is no module nosuch here"),
    (["worker", "json.nosuch:worker"], "there is no module json.nosuch here"),
    (["worker", "json:nosuch"], "module json has no nosuch"),
    (["worker", "json:__name__"], "is a str, not a worker; name a worker, or a function without parameters that"),
    (["worker", "json:detect_encoding"], "is the function detect_encoding(b), not a worker; name a worker, or a"),
    (["worker", "fractions:Fraction"], "fractions:Fraction() returned a Fraction, not a worker; name a worker, or"),
    (["worker", "json:dumps", "--stop-seconds", "soon"], "should be a valid number"),
]


@pytest.mark.parametrize(("arguments", "fragment"), WRONG, ids=lambda value: " ".join(value)[:60])
def test_asked_wrongly_is_one_line_and_status_2(arguments: list[str], fragment: str, txbox: Txbox) -> None:
    txbox(*arguments).failed_in_one_line(2, fragment)
    txbox(*arguments, "--debug").failed_with_traceback(2, fragment)


MODULES = {
    "needs": ("import nosuchlibrary", "module needs failed: ModuleNotFoundError: No module named 'nosuchlibrary'"),
    "syntax": ("worker = = 3", "module syntax failed: SyntaxError: invalid syntax"),
    "leaves": ("raise SystemExit(3)", "module leaves failed: SystemExit: 3"),
    "reads": ("import os\nos.environ['NO_SUCH_VARIABLE']", "KeyError: 'NO_SUCH_VARIABLE' (if it is an env"),
    "upper": ("{}['EUR', 'USD']", "module upper failed: KeyError: ('EUR', 'USD'); --debug"),
    "bare": ("raise KeyError", "module bare failed: KeyError: ; --debug"),
    "raises": ("def worker():\n    raise ValueError('no\\nqueue')", "raises:worker() failed: ValueError: no queue"),
    "wants": ("def worker():\n    return len()", "wants:worker() failed: TypeError: len() takes exactly one argument"),
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
    own_module(monkeypatch, tmp_path, name, source)
    txbox("worker", f"{name}:worker").failed_in_one_line(1, fragment)
    sys.modules.pop(name, None)
    txbox("--debug", "worker", f"{name}:worker").failed_with_traceback(1, fragment)


def test_a_module_that_lacks_the_name_says_which_workers_it_has(
    txbox: Txbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "has_workers.py").write_text(
        "from sqlalchemy import create_engine\n"
        "from txbox import Inbox\n"
        "from txbox_workers.memory_source import MemorySource\n"
        "from txbox_workers.worker import Worker\n"
        "engine = create_engine('postgresql+psycopg://127.0.0.1:1/x')\n"
        "refunds, orders = [Worker(MemorySource(), inbox=Inbox('b'), engine=engine, handler=print) for _ in '12']\n"
        "def nothing():\n    pass\n"
    )
    monkeypatch.chdir(tmp_path)
    txbox("worker", "has_workers:worker").failed_in_one_line(2, "has no worker; it has orders, refunds")
    instead = "not a worker; run `txbox worker has_workers:orders` or `txbox worker has_workers:refunds`"
    txbox("worker", "has_workers:nothing").failed_in_one_line(
        2, f"has_workers:nothing() returned a NoneType, {instead}"
    )
    txbox("worker", "has_workers:Inbox").failed_in_one_line(2, f"is the class Inbox(subscriber_id), {instead}")


def test_a_handler_is_told_from_a_worker_and_never_called(
    txbox: Txbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "billing.py").write_text(
        "def on_purchase(session, message, *, tax=0, **_):\n    raise SystemExit(9)\n"
    )
    txbox("worker", "shop.billing:on_purchase").failed_in_one_line(
        2,
        "shop.billing:on_purchase is the function on_purchase(session, message), not a worker; write "
        "`worker = SqsWorker(queue_url, inbox=Inbox('billing'), engine=engine, handler=on_purchase)` there, and run "
        "`txbox worker shop.billing:worker`",
    )


@pytest.mark.parametrize(
    ("arguments", "level"),
    [
        (["db", "check"], logging.WARNING),
        (["--log-level", "DEBUG", "db", "check"], logging.DEBUG),
        (["db", "--log-level", "info", "check"], logging.INFO),
        (["db", "check", "--log-level=debug"], logging.DEBUG),
        (["--log-level", "DEBUG", "db", "check", "--log-level", "ERROR"], logging.ERROR),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_the_log_level_may_stand_before_and_after_the_command(arguments: list[str], level: int, txbox: Txbox) -> None:
    txbox(*arguments).failed_in_one_line(2, "no database is named")
    assert logging.getLogger("txbox").getEffectiveLevel() == level
    assert logging.getLogger("sqlalchemy").getEffectiveLevel() == max(level, logging.WARNING)


def pages(group: Any = None, *path: str) -> Iterator[tuple[str, ...]]:
    """The program, its groups and its commands, by what stands before their --help."""
    group = group or typer.main.get_command(app.app)
    yield path
    for name, command in getattr(group, "commands", {}).items():
        yield from pages(command, *path, name)


@pytest.mark.parametrize(
    ("path", "columns"),
    [*((path, 80) for path in pages()), ((), 120), (("bulk-load",), 120)],
    ids=lambda value: str(value) if isinstance(value, int) else " ".join(("txbox", *value)),
)
def test_help_fills_its_lines_and_cuts_nothing_off(
    path: tuple[str, ...], columns: int, txbox: Txbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    page = txbox(*path, "--help").out
    assert "--log-level LEVEL" in page
    assert [line for line in page.splitlines() if len(line) > WIDTH] == []
    assert [line for line in page.splitlines()[1:] if line.endswith(("...", "…"))] == []
    prose = page.partition("\n\n")[2].partition("\nOptions:")[0].partition("\nArguments:")[0]
    for paragraph in prose.strip().split("\n\n"):
        for line, following in zip(paragraph.splitlines(), paragraph.splitlines()[1:], strict=False):
            assert len(f"{line} {following.split()[0]}") > WIDTH, f"broken before its end: {line}"


WIDTH = 78
"""Lines longer than this are hard to read, however wide the terminal."""


def test_help_names_the_environment(txbox: Txbox) -> None:
    variables = {f"{Settings.model_config['env_prefix']}{name}".upper() for name in Settings.model_fields}
    assert set(re.findall(r"\bTXBOX_\w+", txbox("--help").out)) == variables
    assert set(re.findall(r"\bTXBOX_\w+", txbox("status", "--help").out)) == {
        name for name in variables if name.startswith(("TXBOX_DATABASE_", "TXBOX_TABLE_"))
    }


def test_what_would_steer_a_terminal_is_escaped_in_text_logs(txbox: Txbox) -> None:
    txbox("status", "--url", "postgresql://127.0.0.1:1/x", "--log-format", "text")
    record = logging.LogRecord("txbox", logging.ERROR, __file__, 1, "%s", ("m\x1b[2J\x9b1m\u202e\nERROR forged",), None)
    (line,) = {handler.format(record) for handler in logging.getLogger().handlers if handler.formatter is not None}
    assert line.endswith(r"m\x1b[2J\x9b1m\u202e\nERROR forged")
    try:
        raise ValueError("bad \x1b[2J")
    except ValueError:
        record.exc_info = sys.exc_info()
    (text,) = {handler.format(record) for handler in logging.getLogger().handlers if handler.formatter is not None}
    assert text.splitlines()[-1] == r"ValueError: bad \x1b[2J"
    assert len(text.splitlines()) > 3, "a traceback keeps its lines"


def test_logs_are_text_or_json(txbox: Txbox) -> None:
    ended = txbox("--log-format", "xml", "status")
    assert ended.status == 2
    assert "--log-format must be one of text, json, not xml" in ended.err
    txbox("status", "--url", "postgresql://127.0.0.1:1/x", "--log-format", "JSON")
    forms = [handler.formatter for handler in logging.getLogger().handlers]
    assert any(isinstance(form, JsonFormatter) for form in forms)
    txbox("status", "--url", "postgresql://127.0.0.1:1/x", "--log-format", "text")
    assert not any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


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

    monkeypatch.setattr(settings, "Settings", broken)
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

    monkeypatch.setattr(settings, "Settings", interrupted)
    txbox("status").failed_in_one_line(130, "interrupted")


WITHOUT_EXTRA = """
import sys
for missing in ("typer", "rich", "pydantic", "pydantic_settings"):
    for name in [name for name in sys.modules if name.startswith("txbox_cli")]:
        del sys.modules[name]
    sys.modules[missing] = None
    try:
        from txbox_cli import main
        main()
    except SystemExit as ended:
        print(missing, ended.code)
    del sys.modules[missing]
"""


def test_without_the_extra_it_says_what_to_install() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRA], capture_output=True, text=True, timeout=60, check=True
    )
    asked = [line.split() for line in ended.stdout.splitlines()]
    assert asked == [["typer", "1"], ["rich", "1"], ["pydantic", "1"], ["pydantic_settings", "1"]]
    for (missing, _), line in zip(asked, ended.stderr.splitlines(), strict=True):
        Ended(1, "", f"{line}\n").failed_in_one_line(1, f"txbox: {missing}", "pip install '.[cli]'")


WITHOUT_LIBPQ = """
import ctypes.util, sys
sys.modules |= dict.fromkeys(("psycopg_c", "psycopg_binary"))
ctypes.util.find_library = lambda name: None
from txbox_cli import main
main()
"""


def test_a_machine_that_psycopg_has_no_build_for_is_told_what_to_install() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_LIBPQ, "status", "--url", "postgresql://nobody@127.0.0.1:1/x"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    Ended(ended.returncode, ended.stdout, ended.stderr).failed_in_one_line(
        1, "no pq wrapper available", "psycopg has no libpq for this machine", "bits): pip install 'psycopg[binary]'"
    )


def test_the_programs_own_click_is_not_needed_and_dev_asks_for_the_extra_that_brings_the_other() -> None:
    program = "import sys\nsys.modules |= dict.fromkeys(('click', 'psutil', 'boto3'))\nfrom txbox_cli.app import run\n"
    late = "assert 'txbox_spark' not in sys.modules"  # which takes a tenth of the start
    ended = subprocess.run(
        [sys.executable, "-c", f"{program}run(['nosuch'])\n{late}\nsys.exit(run(['dev']))"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    asked, without = ended.stderr.splitlines(keepends=True)
    Ended(2, ended.stdout, asked).failed_in_one_line(2, "No such command")
    Ended(ended.returncode, ended.stdout, without).failed_in_one_line(
        1, "the local servers are not installed", "pip install '.[embedded]'"
    )
