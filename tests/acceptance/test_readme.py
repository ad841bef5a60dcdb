"""The README and the pages of the docs: what they show is run as it stands there."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Engine, create_engine, text

from support.documents import Block, Terminals, blocks
from support.waiting import wait_until
from txbox_local import LocalAws

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

pytestmark = pytest.mark.slow  # `make test-pages` runs them, as does CI

REPOSITORY = Path(__file__).parents[2]
PAGES = sorted(page for page in (REPOSITORY / "docs").glob("*.md") if blocks(page))
STARTS_FROM_NOTHING = ("django", "migrations")
"""Pages that create txbox's tables themselves."""

PORT_OF_CELERY = "6399"
"""The port of the page on Celery, which says to use any free one."""


def runnable() -> dict[str, str]:
    """An environment whose commands are those of this interpreter's installation, and which knows no database."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("TXBOX_", "AWS_"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{mine['PATH']}"
    mine["PYTEST_ADDOPTS"] = "-p no:asyncio"  # which warns of settings that a page has no need of
    # Width: a table's cells are not cut in the middle of a word.
    return {**mine, "PATH": path, "COLUMNS": "120", "PYTHONDONTWRITEBYTECODE": "1", "HOME": mine.get("HOME", "/tmp")}


@pytest.fixture
def page_database(page: Path, request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue("fresh_database" if page.stem in STARTS_FROM_NOTHING else "schema_url")


@pytest.fixture
def page_engine(page_database: str) -> Iterator[Engine]:
    engine = create_engine(page_database)
    yield engine
    engine.dispose()


@pytest.fixture
def terminals(
    page: Path, page_database: str, aws: LocalAws, queue: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Terminals]:
    environment = runnable()
    if page.stem != "getting-started":  # whose point it is to make its own
        monkeypatch.setenv("TXBOX_DATABASE_URL", page_database)
        monkeypatch.setenv("QUEUE_URL", queue)
        environment |= {"TXBOX_DATABASE_URL": page_database, "QUEUE_URL": queue, **aws.environment()}
    terminals = Terminals(tmp_path, environment)
    yield terminals
    terminals.close()
    for name in [name for name, module in sys.modules.items() if is_in(module, tmp_path)]:
        # Whoever comes next would be told of connections that were left open.
        for engine in [value for value in vars(sys.modules.pop(name)).values() if isinstance(value, Engine)]:
            engine.dispose()


@pytest.mark.timeout(600)  # the page on bulk loads starts a JVM for each of its commands
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_shows_works(
    page: Path, page_engine: Engine, queue: str, sqs: "SQSClient", terminals: Terminals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(terminals.directory)
    monkeypatch.syspath_prepend(terminals.directory)
    port = str(free_port())
    found = [replace(block, text=block.text.replace(PORT_OF_CELERY, port)) for block in blocks(page)]
    names: dict[str, Any] = {"engine": page_engine, "queue_url": queue, "sqs": sqs, "__name__": page.stem}
    runners: Mapping[str, Callable[[Block], object]] = {
        "python": lambda block: run_python(block, names, page),
        "sql": lambda block: run_sql(block, page_engine),
    }
    for number, block in enumerate(found):
        if block.language == "console":
            terminals.run(block, goes_on=runs_on(block, found[number + 1 :]))
        elif block.title and block.language != "diagram":
            file = terminals.directory / block.title
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text)
        elif block.language in runners:
            runners[block.language](block)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def is_in(module: ModuleType, directory: Path) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and Path(file).is_relative_to(directory)


def runs_on(block: Block, later: list[Block]) -> bool:
    """Whether the last command of a terminal runs until a later block interrupts it."""
    following = next((other for other in later if other.language == "console" and other.title == block.title), None)
    return following is not None and following.text.startswith("^C")


def run_python(block: Block, names: dict[str, Any], page: Path) -> None:
    # Line numbers of a traceback are those of the page.
    exec(compile("\n" * block.line + block.text, str(page), "exec"), names)


def run_sql(block: Block, engine: Engine) -> None:
    with engine.connect() as connection:
        for statement in block.text.split(";\n"):
            if re.sub(r"--.*", "", statement).strip():
                connection.exec_driver_sql(statement.replace("%", "%%"))


def test_the_readmes_example_adds_each_purchase_once(
    schema_url: str, engine: Engine, aws: LocalAws, sqs: "SQSClient", queue: str, tmp_path: Path
) -> None:
    example = next(block for block in blocks(REPOSITORY / "README.md") if block.language == "python")
    (tmp_path / example.title).write_text(example.text)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE account (account_id text PRIMARY KEY, cents bigint)"))
        connection.execute(text("INSERT INTO account VALUES ('ann', 0)"))

    def send(message_id: str, cents: int) -> None:
        sqs.send_message(
            QueueUrl=queue,
            MessageBody=f'{{"account_id": "ann", "cents": {cents}}}',
            MessageAttributes={"message-id": {"DataType": "String", "StringValue": message_id}},
        )

    for number in range(5):
        send(f"p-{number}", 10**number)
        send(f"p-{number}", 10**number)
    environment = {**runnable(), "TXBOX_DATABASE_URL": schema_url, "QUEUE_URL": queue, **aws.environment()}
    with subprocess.Popen([sys.executable, example.title], cwd=tmp_path, env=environment) as process:
        try:

            def emptied() -> bool:
                names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
                answer = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=names)  # type: ignore[arg-type]
                return set(answer["Attributes"].values()) == {"0"}

            wait_until(emptied, "every delivery is acked", timeout=60)
            process.send_signal(signal.SIGTERM)
            send("p-0", 1)  # ends the long poll, which is one of ten seconds
            assert process.wait(60) == 0
        finally:
            process.kill()
    with engine.connect() as connection:
        assert connection.execute(text("SELECT cents FROM account")).scalar_one() == 11111
        assert connection.execute(text("SELECT count(*) FROM processed_message")).scalar_one() == 5


def test_the_site_builds_without_a_warning_and_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=REPOSITORY,
        env={"PATH": "", "NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    for html in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|img|iframe)[^>]* src="(https?:[^"]+)"|<link[^>]* href="(https?:[^"]+)"', html.read_text()
        )
        assert loaded == [], html.name
