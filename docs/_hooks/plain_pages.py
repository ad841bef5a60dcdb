"""Pages for programs: the Markdown of each page beside it, and ``llms.txt``, which lists them (https://llmstxt.org)."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_FENCE = re.compile(r"^```.*?^```\n?", re.M | re.S)
_LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")
_NO_PROSE = re.compile(r"[#|<!-]|\d+\. ")
"""How headings, tables, HTML, notes, images and lists begin."""
_GENERATED = re.compile(r"^(?:::: |<!-- commands -->)", re.M)


def on_post_build(config: Any, **_: object) -> None:
    """Write both into the built site."""
    docs, site = Path(config["docs_dir"]), Path(config["site_dir"])
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}"]
    for section, pages in _sections(config["nav"]):
        listed = []
        for title, name in pages:
            text = (docs / name).read_text("utf-8")
            if _GENERATED.search(text):
                continue  # its text is made from the code, and is in no file
            (site / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(docs / name, site / name)
            listed.append(f"- [{title}]({name}): {purpose(text)}")
        lines += ["", f"## {section}", "", *listed] if listed else []
    (site / "llms.txt").write_text("\n".join(lines) + "\n", "utf-8")


def purpose(page: str) -> str:
    """Return the first sentence of a page's own text."""
    paragraphs = _FENCE.sub("", page).split("\n\n")
    prose = (part for part in paragraphs if part.strip() and not _NO_PROSE.match(part.strip()))
    words = " ".join(_LINK.sub(r"\1", next(prose, "")).split())
    return re.split(r"(?<=[.:?!]) ", words, maxsplit=1)[0]


def _sections(nav: Any) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    for group in nav:
        for title, entries in group.items():
            yield title, list(_pages(entries))


def _pages(entries: Any) -> Iterator[tuple[str, str]]:
    for entry in entries:
        for title, beneath in entry.items():
            if isinstance(beneath, str):
                yield title, beneath
            else:
                yield from _pages(beneath)
