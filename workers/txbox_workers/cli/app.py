"""The program: its commands, the options they share, and how it ends."""

import logging
import sys
import traceback
from typing import Annotated

import click
import typer
from rich.console import Console
from rich.logging import RichHandler

import txbox
from txbox_workers.cli import db, dead_letters, demo, dev, status, worker
from txbox_workers.cli.errors import UsageError, explain

__all__ = ["app", "run"]

app = typer.Typer(
    name="txbox",
    help="Process every message exactly once in effect, with nothing but the Postgres you already have.",
    epilog="New here? `txbox demo` shows it at work on a database and a queue of its own.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo.demo)
app.command("dev")(dev.dev)
app.command("worker")(worker.worker)
app.command("status")(status.status)
app.add_typer(db.app, name="db")
app.add_typer(dead_letters.app, name="dead-letters")


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback when something fails.")] = False,
    log_level: Annotated[str, typer.Option(help="Log this level and above to stderr.")] = "WARNING",
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"txbox {txbox.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit
    level = logging.getLevelNamesMapping().get(log_level.upper())
    if level is None:
        raise UsageError(f"--log-level must be one of DEBUG, INFO, WARNING, ERROR, not {log_level}")
    handler = RichHandler(console=Console(stderr=True), show_path=False, rich_tracebacks=debug)
    logging.basicConfig(level=level, format="%(message)s", handlers=[handler])
    for noisy in ("botocore", "urllib3", "boto3"):
        logging.getLogger(noisy).setLevel(max(level, logging.WARNING))


def run(arguments: list[str] | None = None) -> int:
    """Run the program.

    Args:
        arguments: without the program's name; None takes this process's.

    Returns:
        The exit status: 0 done, 1 failed, 2 asked wrongly.
    """
    given = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in given
    try:
        result = app(args=given, prog_name="txbox", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        sys.stderr.write(f"{error.format_message()}\n")
        return 2
    except click.ClickException as error:
        if debug:
            traceback.print_exc()
        where = getattr(error, "ctx", None)
        hint = f" (see `{where.command_path} --help`)" if where is not None else ""
        return _fail(f"{' '.join(error.format_message().split())}{hint}", error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return _fail("interrupted", 1)
    except Exception as error:  # noqa: BLE001 - whatever it is, it ends as one line
        line = explain(error)
        if debug or line is None:
            traceback.print_exc()
        return _fail(line or f"{type(error).__name__}: {error}", 2 if isinstance(error, UsageError) else 1)
    return result if isinstance(result, int) else 0


def _fail(line: str, status: int) -> int:
    sys.stderr.write(f"txbox: {line}\n")
    return status
