"""Docstrings end a line with ``::`` before an indented example; Markdown knows the indent only."""

import re


def on_page_content(html: str, **_: object) -> str:
    """Take the colons off: a page shows the example, and nothing of how a docstring announces it."""
    return re.sub(r"<p>::</p>\n?", "", html).replace("::</p>", ":</p>")
