"""The program: its commands, the options they share, and how it ends."""

import logging
import sys
from typing import Annotated, Protocol, runtime_checkable

import typer

import txbox
from txbox_workers.cli import db, dead_letters, demo, dev, status, worker
from txbox_workers.cli.errors import UsageError, explain, mask, masked_traceback

__all__ = ["app", "run"]

app = typer.Typer(
    name="txbox",
    help="Process every message exactly once in effect, with nothing but the Postgres you already have.",
    epilog="New here? `txbox demo` shows it at work on a database and a queue of its own.",
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

INTERRUPTED = 130
"""The exit status after Ctrl-C, as shells have it: 128 + SIGINT."""


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    debug: Annotated[  # noqa: ARG001 - shown here, taken by `run`
        bool, typer.Option("--debug", help="Show a traceback when something fails. May stand anywhere.")
    ] = False,
    log_level: Annotated[str, typer.Option(help="Log this level and above to stderr.")] = "WARNING",
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"txbox {txbox.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit
    if log_level.upper() not in LOG_LEVELS:
        raise UsageError(f"--log-level must be one of {', '.join(LOG_LEVELS)}, not {log_level}")
    _log_to_stderr(logging.getLevelNamesMapping()[log_level.upper()])


def run(arguments: list[str] | None = None) -> int:
    """Run the program.

    A reader of our output that has read enough, as `head` does, is typer's business: it ends the process quietly.

    Args:
        arguments: without the program's name; None takes this process's.

    Returns:
        The exit status: 0 done, 1 failed, 2 asked wrongly, 130 interrupted.
    """
    given = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in given
    try:
        status = app(args=[one for one in given if one != "--debug"], prog_name="txbox", standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        return _fail("interrupted", INTERRUPTED)
    except Exception as error:  # noqa: BLE001 - whatever it is, it ends as one line
        if debug:
            sys.stderr.write(masked_traceback(error))
        if isinstance(error, _Complaint):
            return _fail(_with_help(error), error.exit_code)
        return _fail(explain(error), 2 if isinstance(error, UsageError) else 1)
    if status == INTERRUPTED:
        return _fail("interrupted", INTERRUPTED)
    return status if isinstance(status, int) else 0


@runtime_checkable
class _Complaint(Protocol):
    """What typer raises about arguments. Known by its shape: typer has had it from click, and now has its own."""

    exit_code: int

    def format_message(self) -> str: ...


def _with_help(error: _Complaint) -> str:
    said = mask(" ".join(error.format_message().split()))
    context = getattr(error, "ctx", None)
    return said if context is None else f"{said.rstrip('.')} (see `{context.command_path} --help`)"


def _fail(line: str, status: int) -> int:
    sys.stderr.write(f"txbox: {line}\n")
    return status


def _log_to_stderr(level: int) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(_MaskingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
    # At DEBUG these would write down message bodies, statements with their values, and request headers.
    for talkative in ("alembic", "boto3", "botocore", "psycopg", "sqlalchemy", "urllib3"):
        logging.getLogger(talkative).setLevel(max(level, logging.WARNING))


class _MaskingFormatter(logging.Formatter):
    """Writes log lines, tracebacks included, without the passwords of URLs."""

    def format(self, record: logging.LogRecord) -> str:
        return mask(super().format(record))


LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
