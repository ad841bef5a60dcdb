"""Search finds the page of a task or an error first: the guides before the reference, and each error as a heading.

Search weighs headings a thousand times as much as text. In the repository, errors are bold lines and items.
"""

import re
from typing import Any

ERRORS = "troubleshooting.md"
CALLED = {
    "dead-letters.md": ["poison message"],
    "guarantees.md": ["exactly once"],
    "operating.md": ["crash loop"],
}
"""What readers call a page's subject where the page has other words."""
WEIGHTS = {"reference/": 0.5, "changelog.md": 0.2}
_BOLD = re.compile(r"^\*\*(`.+`)\*\*<br>\n", re.M)
_ITEM = re.compile(r"^- (`[^`]+`): (\w)((?:.*\n)(?:  .*\n)*)", re.M)


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Weigh a page, name it as readers do, and make a heading of each error."""
    name = page.file.src_uri
    if name in CALLED:
        page.meta["tags"] = CALLED[name]
    for start, weight in WEIGHTS.items():
        if name.startswith(start):
            page.meta.setdefault("search", {"boost": weight})
    return errors_as_headings(markdown) if name == ERRORS else markdown


def on_page_context(_context: Any, page: Any, **_: object) -> None:
    """Leave the errors out of the table of contents: they are many, and long."""
    if page.file.src_uri == ERRORS:
        for title in page.toc:
            for chapter in title.children:
                chapter.children.clear()


def errors_as_headings(markdown: str) -> str:
    """Return a page whose bold errors, and those that are items, are headings."""
    return _ITEM.sub(
        lambda found: f"### {found[1]}\n\n{found[2].upper()}{found[3]}\n", _BOLD.sub(r"### \1\n\n", markdown)
    )
