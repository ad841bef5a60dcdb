"""The copy button of a terminal copies its commands, without the prompt and without what they print."""

import re
from html import escape, unescape

_BLOCK = re.compile(r'<div class="highlight">(?P<inside>.*?</pre>)', re.S)


def on_page_content(html: str, **_: object) -> str:
    """Give each terminal the text that Material's copy button takes."""
    return _BLOCK.sub(_with_commands, html)


def commands(terminal: str) -> str:
    """Return the commands of a terminal: its lines behind ``$ ``, and the lines that go on after a backslash."""
    copied: list[str] = []
    goes_on = False
    for line in terminal.splitlines():
        if goes_on or line.startswith("$ "):
            copied.append(line if goes_on else line.removeprefix("$ "))
            goes_on = line.endswith("\\")
    return "\n".join(copied)


def _with_commands(found: re.Match[str]) -> str:
    if '<span class="gp">' not in found["inside"]:  # a prompt
        return found[0]
    code = found["inside"].partition("<code>")[2].partition("</code>")[0]
    value = escape(commands(unescape(re.sub(r"<[^>]+>", "", code))))
    return f'<div class="highlight" data-copy="{value}">{found["inside"]}'
