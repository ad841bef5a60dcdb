"""The reference writes itself: what a module is for comes from its docstring, the commands from the program.

In the repository, ``reference/index.md`` lists the modules, and ``reference/commands.md`` says where the commands go.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from txbox_cli.app import app
from txbox_cli.options import ANYWHERE

REPOSITORY = Path(__file__).parents[2]
FOLDERS = ("inbox", "workers", "spark", "migrations")
COMMANDS = "<!-- commands -->"
_MODULE = re.compile(r"^- \[([\w.]+)\]\(\1\.md\)$", re.M)


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Complete the two pages that list something."""
    if page.file.src_uri == "reference/index.md":
        return _MODULE.sub(lambda found: f"{found[0]}: {purpose(found[1])}", markdown)
    if page.file.src_uri == "reference/commands.md":
        return markdown.replace(COMMANDS, "\n\n".join(chapter(path, command) for path, command in commands()))
    return markdown


def purpose(module: str) -> str:
    """Return the first sentence of a module's docstring, without importing the module."""
    path = module.replace(".", "/")
    places = [REPOSITORY / folder / f"{path}{end}" for folder in FOLDERS for end in (".py", "/__init__.py")]
    (file,) = [place for place in places if place.is_file()]
    docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
    sentence = re.split(r"(?<=\.)\s", " ".join(docstring.partition("\n\n")[0].split()), maxsplit=1)[0]
    return sentence.replace("``", "`")


def commands(group: Any = None, path: str = "txbox") -> Iterator[tuple[str, Any]]:
    """Yield every command that does something, with what it is called."""
    group = group or typer.main.get_command(app)
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", getattr(command, "whole", command)


def chapter(path: str, command: Any) -> str:
    """Return what ``--help`` says of a command, as Markdown."""
    parts = [f"## {path}"]
    for paragraph in (command.help or "").strip().split("\n\n"):
        lines = paragraph.strip("\n").splitlines()
        # \b keeps the line breaks of a paragraph.
        parts.append("\n".join(["```text", *lines[1:], "```"] if lines and lines[0] == "\b" else lines))
    context = typer.Context(command, info_name=path)
    records = [
        parameter.get_help_record(context)
        for parameter in command.params
        if parameter.name not in ANYWHERE and not getattr(parameter, "hidden", False)
    ]
    parts.append("\n".join(f"- `{record[0]}`: {record[1]}" for record in records if record is not None))
    return "\n\n".join(part for part in parts if part)
