"""``txbox init``: write the first files of a service: a handler, its test, its settings, and a script that sends."""

import shlex
from dataclasses import dataclass
from os.path import realpath
from pathlib import Path
from typing import Annotated

import typer

from txbox.errors import install_command
from txbox_cli.errors import CommandFailed, UsageError
from txbox_cli.output import printable

TEMPLATES = Path(__file__).parents[1] / "templates"
SUFFIX = ".tmpl"
"""Ends the names of templates, so that no tool takes them for modules or tests of ours."""

DEV = "txbox dev --queue purchases > dev.env"
SEND = "source dev.env && python send.py"
MIGRATE = "python manage.py makemigrations billing && python manage.py migrate"


@dataclass(frozen=True, slots=True)
class NewService:
    """What to run in a new service, each in a terminal of its own, and what that and its tests need."""

    commands: tuple[str, str, str]
    extras: str
    packages: str


KINDS = {
    "worker": NewService(
        (DEV, "source dev.env && txbox worker billing:make_worker", SEND), "aws,cli,embedded", "pytest"
    ),
    "fastapi": NewService(
        (DEV, "source dev.env && uvicorn --factory app:make_app", SEND),
        "aws,cli,embedded,http,typed",
        "fastapi httpx2 pytest uvicorn",
    ),
    "django": NewService(
        (
            "txbox dev --no-tables --queue purchases > dev.env",
            f"source dev.env && {MIGRATE} && python manage.py txbox_worker billing.worker:make_worker",
            SEND,
        ),
        "aws,cli,django,embedded",
        "",
    ),
    "lambda": NewService(("txbox dev > dev.env", SEND, "pytest"), "aws,cli,embedded", "pytest"),
}
"""By the names of their options, and of their folders in ``TEMPLATES``."""


def init(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIRECTORY", help="Where to write; made if it is missing.", file_okay=False, show_default=False
        ),
    ] = Path(),
    fastapi: Annotated[bool, typer.Option("--fastapi", help="A service of FastAPI with a worker inside.")] = False,
    django: Annotated[bool, typer.Option("--django", help="A project of Django whose worker uses the ORM.")] = False,
    lambda_: Annotated[bool, typer.Option("--lambda", help="A function of Lambda behind a queue.")] = False,
) -> None:
    """Write the first files of a service: a handler, its test, its settings, and a script that sends a message.

    It adds purchases from a queue to accounts, each once. Files that are there already are kept as they are. At the
    end come the three commands that run it on servers of your own machine.
    """
    given = [name for name, wanted in (("fastapi", fastapi), ("django", django), ("lambda", lambda_)) if wanted]
    if len(given) > 1:
        raise UsageError(f"--{given[0]} and --{given[1]} write different services; give one of them")
    name = given[0] if given else "worker"
    templates = sorted((TEMPLATES / name).rglob(f"*{SUFFIX}"))
    files = {directory / one.relative_to(TEMPLATES / name).with_suffix(""): one.read_bytes() for one in templates}
    for folder in {path.parent for path in files}:
        _make_folder(folder, directory)
    for path, content in files.items():
        file = path.relative_to(directory)
        typer.echo(f"wrote {file}" if _write_new(path, content) else f"kept {file} (it is there already)")
    _print_next(KINDS[name], directory)


def _make_folder(folder: Path, directory: Path) -> None:
    """Make a folder unless it is there.

    Raises:
        CommandFailed: it cannot be made, or a symbolic link leads out of the directory.
    """
    if not Path(realpath(folder)).is_relative_to(realpath(directory)):  # unlike resolve(), it takes a link to itself
        raise CommandFailed(f"{folder} is a symbolic link that leads out of {directory}; rename it, or remove it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_write(folder, error) from error


def _write_new(path: Path, content: bytes) -> bool:
    """Write a file, and return True; return False if there is one, or a symbolic link.

    Raises:
        CommandFailed: it cannot be written.
    """
    try:
        with path.open("xb") as file:  # neither overwrites nor follows a link, whoever writes here now
            try:
                file.write(content)
                file.flush()
            except OSError:
                path.unlink()  # half of a file would be kept the next time
                raise
    except FileExistsError:
        return False
    except OSError as error:
        raise _cannot_write(path, error) from error
    return True


def _cannot_write(path: Path, error: OSError) -> CommandFailed:
    return CommandFailed(f"cannot write {path}: {error.strerror}; name a directory in which you can write")


def _print_next(kind: NewService, directory: Path) -> None:
    """Print the next commands, to be pasted, and what they need."""
    there = "" if directory == Path() else f"cd {shlex.quote(str(directory))} && "
    typer.echo('\nNext, each in a terminal of its own, the others once the first one says "ready":\n')
    for command in kind.commands:
        typer.echo(f"  {printable(there)}{command}")
    packages = f"; and pip install {kind.packages}" if kind.packages else ""
    typer.echo(f"\nThey need: {install_command(kind.extras)}{packages}")
