"""The tests that prove the guarantees: ``guarantees.yaml`` has them by case, and the site shows them as a page.

In the repository a link such as ``guarantees.yaml#redelivery`` leads to the names of the tests. On the site it leads to
the page ``guarantees-tests``, which is made here: each case as ``guarantees.md`` words it, and each test with its file.
"""

import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import yaml
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel

REPOSITORY = Path(__file__).parents[2]
DATA = "guarantees.yaml"
PAGE = "guarantees-tests.md"
_LINK = re.compile(r"\[([^\]]+)\]\((?:\.\./)*guarantees\.yaml#([\w-]+)\)")
_ANY_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")
_HEADER = """\
---
hide: [toc]
search:
  exclude: true
---

# The tests behind the guarantees

[Guarantees](guarantees.md) says what txbox promises. These tests of the repository prove it, case by case.
"""


def on_files(files: Files, *, config: Any) -> Files:
    """Add the page. The data stay beside it, where the Markdown of the guarantees links to them."""
    docs = Path(config.docs_dir)
    content = annex(
        (docs / "guarantees.md").read_text(),
        yaml.safe_load((docs / DATA).read_text()),
        files_of_tests(REPOSITORY),
    )
    files.append(File.generated(config, PAGE, content=content, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Have links to the data lead to the page."""
    return re.sub(r"(\]\((?:\.\./)*)guarantees\.yaml#", r"\1guarantees-tests.md#", markdown)


def files_of_tests(repository: Path) -> dict[str, list[str]]:
    """Return the files of each test, by its name, as paths inside the repository."""
    suites = (repository / "workers/txbox_testing/conformance").glob("*.py")
    found: dict[str, list[str]] = {}
    for path in sorted([*(repository / "tests").rglob("test_*.py"), *suites]):
        for name in set(re.findall(r"def (test_\w+)\(", path.read_text())):
            found.setdefault(name, []).append(path.relative_to(repository).as_posix())
    return found


def annex(guarantees: str, tests: dict[str, list[str]], files: dict[str, list[str]]) -> str:
    """Return the page in Markdown: cases in the order of ``guarantees.md``, then those that only other pages link to.

    Args:
        guarantees: the text of ``guarantees.md``.
        tests: the names of the tests of each case.
        files: the files of each test.

    Raises:
        PluginError: a case has no tests, or a test has no file.
    """
    parts = [_HEADER]
    heading = ""
    rest = dict.fromkeys(tests)
    for line in guarantees.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        for answer, key in _LINK.findall(line):
            if heading:
                parts.append(f"\n## {heading}\n")
                heading = ""
            cells = line.split(" | ")
            case = f"{_plain(cells[0])}: {answer}" if len(cells) > 1 else answer
            parts.append(f"\n### {case} {{ #{key} }}\n\n")
            parts += _items(key, tests, files)
            rest.pop(key)
    if rest:
        parts.append("\n## Other pages\n")
    for key in rest:
        parts.append(f"\n### {key.replace('-', ' ')} {{ #{key} }}\n\n")
        parts += _items(key, tests, files)
    return "".join(parts)


def _items(key: str, tests: dict[str, list[str]], files: dict[str, list[str]]) -> Iterator[str]:
    if not tests.get(key):
        raise PluginError(f"{DATA} has no tests for {key}")
    for name in tests[key]:
        if name not in files:
            raise PluginError(f"{DATA}, {key}: there is no test {name}")
        places = ", ".join(_breakable(path, "/") for path in files[name])
        yield f"- {_breakable(name, '_')} in {places}\n"


def _breakable(text: str, after: str) -> str:
    """Return a name as code that a narrow screen may break at any of its parts."""
    return f"<code>{escape(text).replace(after, f'{after}<wbr>')}</code>"


def _plain(text: str) -> str:
    return _ANY_LINK.sub(r"\1", text)
