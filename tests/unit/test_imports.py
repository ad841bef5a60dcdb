"""What an import brings along: a service, a function in Lambda and ``--help`` wait for it at every start."""

import pickle
import subprocess
import sys

import pytest

import txbox

FRAMEWORKS = {"boto3", "celery", "django", "moto", "pydantic", "pyspark", "rich", "txbox_spark", "txbox_workers"}
"""No import of the library brings these."""

DRIVERS = {"sqlalchemy.dialects.postgresql", "sqlalchemy.ext.asyncio", "sqlalchemy.orm"}
"""An engine and mapped classes bring them; whoever has none does not wait for them."""

CORE = (
    "from txbox import Inbox, Outbox, DeadLetters, Failures, SqlEffect, idempotent, AsyncInbox, AsyncOutbox",
    "import txbox; txbox.Inbox",
    "import txbox.coroutines; txbox.coroutines.AsyncWatermarks",
)


def loaded_by(program: str, unasked: set[str]) -> set[str]:
    """Run a program in a Python of its own; return which of the modules it has loaded."""
    asked = f"{program}\nimport sys; print(*({unasked!r} & sys.modules.keys()), file=sys.stderr)"
    ended = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, timeout=60, check=True)
    return set(ended.stderr.split())


def test_the_library_alone_loads_no_library() -> None:
    assert loaded_by("import txbox", FRAMEWORKS | DRIVERS | {"asyncio", "psycopg", "sqlalchemy"}) == set()


@pytest.mark.parametrize("program", CORE)
def test_what_records_and_publishes_loads_neither_mapped_classes_nor_the_dialects(program: str) -> None:
    assert loaded_by(program, FRAMEWORKS | DRIVERS) == set()


def test_lazy_names_are_names_like_others() -> None:
    assert set(txbox.__all__) <= set(dir(txbox))
    assert "errors" in dir(txbox)
    assert pickle.loads(pickle.dumps(txbox.DeadLetters)) is txbox.DeadLetters
    assert vars(txbox)["DeadLetters"] is txbox.DeadLetters, "it is looked up once"
    with pytest.raises(AttributeError, match="module 'txbox' has no attribute 'Nosuch'"):
        txbox.Nosuch  # noqa: B018
    star = "from txbox import *; print(Inbox.__name__)"
    ended = subprocess.run([sys.executable, "-c", star], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "Inbox\n"


LIBRARIES = {"alembic", "boto3", "psycopg", "pydantic_settings", "pyspark", "rich", "sqlalchemy", "txbox_migrations"}
"""What commands run with."""

SHOW_NOTHING_OF_THEM = (
    *("demo", "init", "dev", "status", "dashboard", "exporter", "pause", "resume", "archive", "reconcile"),
    *("dead-letters", "loads", "outbox", "outbox sent", "outbox replay"),
)

SHOW_DEFAULTS_OF_THE_LIBRARY = (
    *("worker", "schema", "relay", "maintain", "audit"),
    *("dead-letters list", "dead-letters redrive", "dead-letters import"),
)


def loaded_by_help(*commands: str) -> set[str]:
    """Return all modules that ``txbox COMMAND --help`` loads, for these commands in one process."""
    program = f"from txbox_cli.app import run\nfor one in {commands!r}: assert run([*one.split(), '--help']) == 0"
    asked = f"{program}\nimport sys; print(*sys.modules, file=sys.stderr)"
    ended = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, timeout=60, check=True)
    return set(ended.stderr.split())


def test_the_help_of_the_program_loads_no_command() -> None:
    loaded = loaded_by_help("")
    assert loaded & (LIBRARIES | DRIVERS | {"asyncio", "pydantic", "txbox_workers"}) == set()
    assert [name for name in loaded if name.startswith("txbox_cli.commands.")] == []


def test_the_help_of_a_command_does_not_load_what_it_runs_with() -> None:
    loaded = loaded_by_help(*SHOW_NOTHING_OF_THEM)
    assert loaded & (LIBRARIES | {"asyncio", "txbox_workers"}) == set()
    assert "txbox_cli.commands.relay" not in loaded, "nobody has asked for it"


def test_help_that_shows_defaults_of_the_library_loads_it_alone() -> None:
    assert loaded_by_help(*SHOW_DEFAULTS_OF_THE_LIBRARY) & (LIBRARIES - {"psycopg", "sqlalchemy"}) == set()
