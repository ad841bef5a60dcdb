"""The SQL files: every statement is described, its tables are named in full, and its values are only bound."""

import ast
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import txbox
import txbox_dashboard
import txbox_spark
import txbox_testing
import txbox_workers
from txbox.inbox.inbox import InboxStatements
from txbox.postgres.sql_files import SqlFile, parse
from txbox.schema import TABLE_NAMES, VIEW_NAME

MODULES = (txbox, txbox_workers, txbox_dashboard, txbox_spark, txbox_testing)
PACKAGES = [Path(module.__file__ or "").parent for module in MODULES]
FILES = sorted(file for package in PACKAGES for file in package.rglob("*.sql"))
SQL_VERB = re.compile(r"\s*(SELECT|INSERT INTO|UPDATE|DELETE FROM|WITH|CREATE|ALTER|SET LOCAL|DO|LOCK|DROP)\s")


def loaders() -> list[type[SqlFile]]:
    for module in MODULES:
        for found in pkgutil.walk_packages(module.__path__, f"{module.__name__}."):
            if not any(optional in found.name for optional in ("opentelemetry", "prometheus", "__main__", ".job")):
                importlib.import_module(found.name)
    # Not those of other packages, which other tests have imported.
    ours = {module.__name__ for module in MODULES}
    found_here = (kind for kind in SqlFile.__subclasses__() if kind.__module__.partition(".")[0] in ours)
    return sorted(found_here, key=lambda kind: kind.__module__)


LOADERS = loaders()


def everything(found: SqlFile) -> dict[str, str]:
    return {name: text for name, text in vars(found).items() if isinstance(text, str)}


def headers(text: str) -> dict[str, str]:
    """The comments of each statement by name; fragments have none of their own to check."""
    parts = re.split(r"^-- (name|fragment): (\w+)$", text, flags=re.MULTILINE)[1:]
    return {
        name: "\n".join(line for line in body.splitlines() if line.startswith("--"))
        for kind, name, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True)
        if kind == "name"
    }


def test_there_are_files_and_each_has_a_class() -> None:
    assert len(FILES) >= 5
    assert sorted(Path(kind._file).name for kind in LOADERS) == sorted(file.name for file in FILES)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_each_statement_says_what_it_is_for_what_it_takes_and_what_it_returns(file: Path) -> None:
    text = file.read_text()
    statements = parse(text)
    for name, header in headers(text).items():
        purpose, _, rest = header.partition("-- parameters: ")
        assert purpose.strip("- \n"), f"{name} has no purpose"
        parameters, _, returned = rest.partition("-- returns: ")
        assert parameters, f"{name} does not say its parameters"
        assert returned.strip(), f"{name} does not say what it returns"
        listed = re.sub(r"\([^)]*\)", "", parameters.replace("\n--  ", ""))
        declared = set(re.findall(r"(?:^|, )(\w+) ", listed)) - {"none"}
        used = set(re.findall(r"%\((\w+)\)s", filled(statements[name], statements)))
        if "%s" not in filled(statements[name], statements):  # or else they are by position, and the header says why
            assert declared == used, f"{name} takes {used}, and declares {declared}"


def filled(text: str, fragments: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda match: filled(fragments.get(match[1], ""), fragments), text)


@pytest.mark.parametrize("kind", LOADERS, ids=lambda kind: kind.__name__)
def test_each_class_has_the_statements_of_its_file(kind: type[SqlFile]) -> None:
    file = Path(importlib.import_module(kind.__module__).__file__ or "").with_name(kind._file)
    found = everything(kind.load("somewhere", "pre_"))
    # A fragment may be wanted too, for a statement that is made of the caller's columns.
    assert set(headers(file.read_text())) <= set(found) <= set(parse(file.read_text()))
    for name, text in found.items():
        assert "{{" not in text, name
        assert "--" not in re.sub(r"- -1|'[^']*'", "", text), f"{name} sends its comments"


@pytest.mark.parametrize("kind", LOADERS, ids=lambda kind: kind.__name__)
def test_every_statement_that_names_a_table_names_it_in_full(kind: type[SqlFile]) -> None:
    for name, text in everything(kind.load("somewhere", "pre_")).items():
        for table in (*TABLE_NAMES, VIEW_NAME):
            naked = re.findall(rf"(?<!somewhere\.pre_)\b{table}\b", text)
            assert naked == [], f"{name} names {table} without schema and prefix"


def test_the_same_place_gives_the_same_object() -> None:
    assert InboxStatements.load("billing", "x_") is InboxStatements.load("billing", "x_")
    assert InboxStatements.load("billing") is not InboxStatements.load("shipping")


@pytest.mark.parametrize(
    ("schema", "prefix", "quoted", "for_people"),
    [
        (None, "", "processed_message", "processed_message"),
        ("billing", "", "billing.processed_message", "billing.processed_message"),
        (None, "txbox_", "txbox_processed_message", "txbox_processed_message"),
        # A percent sign is doubled for psycopg's placeholders, and only for them.
        ("Odd schema-%", "", '"Odd schema-%%".processed_message', '"Odd schema-%".processed_message'),
        ('a"b', "P%", '"a""b"."P%%processed_message"', '"a""b"."P%processed_message"'),
        ("select", "", '"select".processed_message', '"select".processed_message'),
    ],
)
def test_names_are_quoted_as_they_need_it(schema: str | None, prefix: str, quoted: str, for_people: str) -> None:
    found = InboxStatements.load(schema, prefix)
    assert f"INSERT INTO {quoted} (subscriber_id" in found.record_one
    assert found.name_of("processed_message") == for_people


def test_a_file_is_read_by_its_headers() -> None:
    text = "-- about the file\n\n-- fragment: x\n1\n\n-- name: a\n-- why\nSELECT {{x}}\n  -- within\n  + 2\n"
    assert parse(text) == {"x": "1", "a": "SELECT {{x}}\n  + 2"}


_OF_COLUMNS = (("watermarks", "watermarks.py"), ("effects", "sql_script.py"), ("effects", "upsert.py"))


def test_sql_is_written_in_sql_files() -> None:
    """But for statements that are made of the caller's columns: of watermarks, and of effects."""
    elsewhere = [
        f"{path.relative_to(package)}:{node.lineno}"
        for package in (Path(txbox.__file__).parent,)
        for path in sorted(package.rglob("*.py"))
        if path.parts[-2:] not in _OF_COLUMNS and path.name not in ("schema.py", "sql.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and SQL_VERB.match(node.value)
    ]
    assert elsewhere == []
