"""The program: its commands, shared options and exit statuses."""

import logging
import sys
from typing import Annotated, Protocol, runtime_checkable

import typer

import txbox
from txbox.postgres.urls import DATABASE_URL_VARIABLE
from txbox_cli.errors import Interrupted, UsageError, explain, mask, masked_traceback
from txbox_cli.options import PREFIX_VARIABLE, SCHEMA_VARIABLE, Commands
from txbox_cli.output import printable

INTERRUPTED = 130
"""The exit status after Ctrl-C, as in shells: 128 + SIGINT."""

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
DEFAULT_LOG_LEVEL = "WARNING"
TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

LOG_FORMATS = ("text", "json")

# \b keeps the line breaks of a paragraph.
EPILOGUE = f"""\b
Environment:
  {DATABASE_URL_VARIABLE:21}  the database, where --url does not name it
  {SCHEMA_VARIABLE:21}  the schema, where --schema does not name it
  {PREFIX_VARIABLE:21}  the prefix, where --prefix does not name it
  TXBOX_DASHBOARD_TOKEN  what a person gives to use `txbox dashboard`
  TXBOX_KEEP_INBOX       a window of `txbox maintain`, as are
                         TXBOX_KEEP_LEASES, TXBOX_KEEP_RESULTS,
                         TXBOX_KEEP_LETTERS, TXBOX_KEEP_SENT,
                         TXBOX_KEEP_LOADS, TXBOX_KEEP_STAGING,
                         TXBOX_KEEP_OPERATIONS, TXBOX_KEEP_RESPONSES

AWS is found as boto3 finds it: by AWS_ENDPOINT_URL, AWS_DEFAULT_REGION, AWS_PROFILE and the like.

New here? `txbox demo` shows it at work on a database and a queue of its own."""

_COMMANDS = "txbox_cli.commands"

loads = Commands(help="Look at the runs of bulk loads, finish them, forget them.")
loads.later("list", f"{_COMMANDS}.loads", "List runs, the last begun first.", attribute="list_loads")
loads.later("show", f"{_COMMANDS}.loads", "Show one run whole, and how to finish it.")
loads.later(
    "resume",
    f"{_COMMANDS}.bulk_load",
    "Finish a run that was stopped or has failed.",
    attribute="bulk_load",
    change="take_run",
)
loads.later("forget", f"{_COMMANDS}.loads", "Delete runs from the ledger.")

app = Commands(
    name="txbox",
    help="Process every message exactly once in effect, with nothing but the Postgres you already have.",
    epilog=EPILOGUE,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.later("demo", f"{_COMMANDS}.demo", "See it count to the cent while workers are killed.")
app.later("init", f"{_COMMANDS}.init", "Write a handler, its test and a sender to start from.")
app.later("dev", f"{_COMMANDS}.dev", "Start a PostgreSQL and a local AWS of your own.")
app.later("worker", f"{_COMMANDS}.worker.command", "Run a worker until SIGTERM or Ctrl-C, then drain it.")
app.later("schema", f"{_COMMANDS}.schema", "Print the JSON Schema of a message type.")
app.later("relay", f"{_COMMANDS}.relay", "Send what the outbox holds.")
app.later("maintain", f"{_COMMANDS}.maintain", "Forget what was kept long enough.")
app.later("status", f"{_COMMANDS}.status", "Show what is processed, waits, is parked, blocks.")
app.later("dashboard", f"{_COMMANDS}.dashboard", "Show all of that in a browser, live.")
app.later("exporter", f"{_COMMANDS}.exporter", "Serve all of that to Prometheus.")
app.later("pause", f"{_COMMANDS}.pause", "Have workers or relays leave something alone.")
app.later("resume", f"{_COMMANDS}.pause", "End a pause.")
app.later("bulk-load", f"{_COMMANDS}.bulk_load", "Apply events from files once, by Spark.")
app.later("audit", f"{_COMMANDS}.audit", "Prove that all that was sent is processed.")
app.later("archive", f"{_COMMANDS}.archive", "Move old days to Parquet, by Spark.")
app.later("reconcile", f"{_COMMANDS}.reconcile", "Compare an archive of events with the inbox.")
app.later("db", f"{_COMMANDS}.db", "Create, change and check the tables.", attribute="app")
app.later("dead-letters", f"{_COMMANDS}.dead_letters", "Look at parked messages, send them again.", attribute="app")
app.later("loads", __name__, "Look at bulk loads, finish and forget them.")
app.later("outbox", f"{_COMMANDS}.outbox", "Look up what was sent, and send it again.", attribute="app")
app.later("subscriptions", f"{_COMMANDS}.subscriptions", "Say who gets the messages of a topic.", attribute="app")


def _log_from(level: str | None) -> None:
    if level is None:
        return
    if level.upper() not in LOG_LEVELS:
        raise UsageError(f"--log-level must be one of {', '.join(LOG_LEVELS)}, not {level}")
    _log_to_stderr(logging.getLevelNamesMapping()[level.upper()])


def _log_as(form: str | None) -> None:
    if form is None:
        return
    if form.lower() not in LOG_FORMATS:
        raise UsageError(f"--log-format must be one of {', '.join(LOG_FORMATS)}, not {form}")
    from txbox.instrumentation.json_logs import JsonFormatter

    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonFormatter(mask) if form.lower() == "json" else _MaskingFormatter(TEXT_FORMAT))


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    debug: Annotated[  # noqa: ARG001 - shown here, taken by `run`
        bool, typer.Option("--debug", help="Show a traceback when something fails.", expose_value=False)
    ] = False,
    log_level: Annotated[  # noqa: ARG001 - shown here, taken by its callback
        str | None,
        typer.Option(
            metavar="LEVEL",
            help=f"Log to stderr from this level on: {', '.join(LOG_LEVELS)}; {DEFAULT_LOG_LEVEL} by default.",
            callback=_log_from,
            expose_value=False,
        ),
    ] = None,
    log_format: Annotated[  # noqa: ARG001 - shown here, taken by its callback
        str | None,
        typer.Option(
            metavar="FORMAT",
            help=f"Log as {' or '.join(LOG_FORMATS)}; JSON has an object on each line, with the message in hand.",
            callback=_log_as,
            expose_value=False,
        ),
    ] = None,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"txbox {txbox.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


def run(arguments: list[str] | None = None) -> int:
    """Run the program.

    typer handles a reader of our output that stops early, as `head` does: it ends the process without an error.

    Args:
        arguments: without the program's name. None means this process's.

    Returns:
        The exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted.
    """
    given = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in given
    _log_from(DEFAULT_LOG_LEVEL)
    try:
        status = typer.main.get_command(app).main(
            args=[one for one in given if one != "--debug"], prog_name="txbox", standalone_mode=False, obj=tuple(given)
        )
    except (typer.Abort, KeyboardInterrupt):
        return _fail("interrupted", INTERRUPTED)
    except Exception as error:  # noqa: BLE001 - every error becomes one line
        if debug:
            sys.stderr.write(masked_traceback(error))
        if isinstance(error, _Complaint):
            return _fail(_with_help(error), error.exit_code)
        if isinstance(error, Interrupted):
            return _fail(explain(error), INTERRUPTED)
        return _fail(explain(error), 2 if isinstance(error, UsageError) else 1)
    if status == INTERRUPTED:
        return _fail("interrupted", INTERRUPTED)
    return status if isinstance(status, int) else 0


@runtime_checkable
class _Complaint(Protocol):
    """typer's error about arguments. Matched by shape: older versions of typer use click's, newer ones their own."""

    exit_code: int

    def format_message(self) -> str: ...


def _with_help(error: _Complaint) -> str:
    message = mask(" ".join(error.format_message().split()))
    context = getattr(error, "ctx", None)
    return message if context is None else f"{message.rstrip('.')} (see `{context.command_path} --help`)"


def _fail(line: str, status: int) -> int:
    sys.stderr.write(f"txbox: {printable(line)}\n")
    return status


def _log_to_stderr(level: int) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(_MaskingFormatter(TEXT_FORMAT))
    logging.basicConfig(handlers=[handler])  # has an effect only the first time
    logging.getLogger().setLevel(level)
    # At DEBUG these would log message bodies, values in statements and request headers.
    for talkative in ("alembic", "boto3", "botocore", "psycopg", "sqlalchemy", "urllib3"):
        logging.getLogger(talkative).setLevel(max(level, logging.WARNING))


class _MaskingFormatter(logging.Formatter):
    """Formats log lines and tracebacks without the passwords in URLs and without terminal control characters.

    Ids and errors come from anyone: they must not begin a line of their own or colour the output.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's
        return printable(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        return printable(mask(super().format(record)), keep="\n\t")
