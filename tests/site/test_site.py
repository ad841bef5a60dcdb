"""What the built site has beside its pages: Markdown and a list for programs, commands to copy, and the proofs."""

import importlib.util
import re
from html import unescape
from pathlib import Path

import pytest
import yaml
from mkdocs.commands.build import build
from mkdocs.config import load_config

REPOSITORY = Path(__file__).parents[2]
HOOKS = REPOSITORY / "docs" / "_hooks"
PAGE = """# Orders

```diagram title="An order"
 a ──▶ b
```

1. An order is no prose. Nor is a list.

It takes [orders](index.md), each once. Then it sends them.

```console title="Terminal 1"
$ txbox dev \\
    --queue orders > dev.env
ready; the data in … goes when you stop
$ echo "<a & b>"
<a & b>
```

```console title="Terminal 1"
^C
stopped
```
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    (folder / "docs").mkdir()
    (folder / "docs" / "index.md").write_text(PAGE)
    (folder / "docs" / "names.md").write_text("# Names\n\n::: txbox\n")
    settings = {
        "site_name": "shop",
        "site_description": "Sells.",
        "use_directory_urls": False,
        "theme": {"name": "material", "font": False, "features": ["content.code.copy"]},
        "nav": [{"Start": [{"Orders": "index.md"}]}, {"Reference": [{"Names": "names.md"}]}],
        "hooks": [str(HOOKS / "copied_commands.py"), str(HOOKS / "plain_pages.py")],
        "markdown_extensions": ["pymdownx.highlight", "pymdownx.superfences"],
    }
    (folder / "mkdocs.yml").write_text(yaml.safe_dump(settings))
    build(load_config(str(folder / "mkdocs.yml")))
    return folder / "site"


def test_the_copy_button_copies_commands_and_nothing_else(site: Path) -> None:
    copied = [unescape(one) for one in re.findall(r'data-copy="([^"]*)"', (site / "index.html").read_text())]
    assert copied == ['txbox dev \\\n    --queue orders > dev.env\necho "<a & b>"']


def test_programs_find_each_page_with_its_purpose(site: Path) -> None:
    assert (site / "index.md").read_text() == PAGE
    assert (site / "llms.txt").read_text() == (
        "# shop\n\n> Sells.\n\n## Start\n\n- [Orders](index.md): It takes orders, each once.\n"
    )


def test_the_sites_own_settings_have_these_hooks() -> None:
    settings = (REPOSITORY / "mkdocs.yml").read_text()
    assert [path.name for path in sorted(HOOKS.glob("*.py")) if f"docs/_hooks/{path.name}" not in settings] == []


def test_the_page_of_proofs_has_every_case_and_every_test() -> None:
    path = HOOKS / "guarantees.py"
    spec = importlib.util.spec_from_file_location("guarantees_hook", path)
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    proofs = yaml.safe_load((HOOKS.parent / "guarantees.yaml").read_text())
    text = hook.annex((HOOKS.parent / "guarantees.md").read_text(), proofs, hook.files_of_tests(REPOSITORY))
    cases = dict(re.findall(r"^### .* \{ #([\w-]+) \}\n\n((?:- .*\n)+)", text, re.M))
    shown = {
        key: re.findall(r"^- <code>(test_\w+)</code>", part.replace("<wbr>", ""), re.M) for key, part in cases.items()
    }
    assert shown == proofs
