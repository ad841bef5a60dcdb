"""Options that several commands share, and the functions that read them."""

import getpass
import inspect
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import typer
from typer.core import TyperGroup

from txbox.errors import InvalidConfiguration, NotSendable, SchemaMissing
from txbox.postgres.urls import DATABASE_URL_VARIABLE, database_engine, database_url
from txbox.text import host_name
from txbox_cli.errors import CommandFailed, UsageError, explain

if TYPE_CHECKING:
    from sqlalchemy import URL, Engine

SCHEMA_VARIABLE = "TXBOX_DATABASE_SCHEMA"
PREFIX_VARIABLE = "TXBOX_TABLE_PREFIX"

LONGEST_SPAN = timedelta(days=365_000)
"""The longest span accepted. Not much further back, Postgres has no times."""

UrlOption = Annotated[
    str | None,
    typer.Option("--url", help=f"The database, postgresql://user:password@host/name. Or {DATABASE_URL_VARIABLE}."),
]
SchemaOption = Annotated[
    str | None,
    typer.Option(
        "--schema", help=f"The schema of the tables. Or {SCHEMA_VARIABLE}; without either, the search path decides."
    ),
]
PrefixOption = Annotated[
    str | None, typer.Option("--prefix", help=f"What the tables' names start with. Or {PREFIX_VARIABLE}.")
]


def checked_destination(parameter: typer.CallbackParam, text: str | None) -> str | None:
    """Return the destination given as an option; a typer callback.

    Raises:
        UsageError: it is not a destination.
    """
    if text is not None:
        from txbox.messages.destinations import scheme

        try:
            scheme(text)
        except NotSendable as error:
            raise UsageError(f"{parameter.opts[0]}: {error}") from error
    return text


PublishToOption = Annotated[
    str | None,
    typer.Option(
        "--publish-to",
        metavar="URL",
        help="Publish each row that the last statement of --apply returns (… RETURNING customer_id AS key, "
        "jsonb_build_object(…) AS body) in the same transaction; `txbox relay` sends it to this queue's URL, or "
        "topic's or event bus's ARN.",
        callback=checked_destination,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@dataclass(frozen=True, slots=True)
class DatabaseTarget:
    """The database, and the schema and prefix of the tables."""

    url: "URL"
    schema: str | None
    prefix: str
    options: str = ""
    """The options that name schema and prefix. What the environment names, the next command finds by itself."""

    @contextmanager
    def engine(self, **options: object) -> "Iterator[Engine]":
        """Open an engine for one command. ``options`` are those of ``create_engine``."""
        from sqlalchemy.exc import DBAPIError

        engine = database_engine(self.url, **options)
        try:
            yield engine
        except (SchemaMissing, DBAPIError) as error:
            message = explain(error)
            if not self.options or UPGRADE not in message:
                raise
            raise CommandFailed(message.replace(UPGRADE, f"{UPGRADE[:-1]} {self.options}`")) from error
        finally:
            engine.dispose()


def database(url: UrlOption = None, schema: SchemaOption = None, prefix: PrefixOption = None) -> DatabaseTarget:
    """Return the database named by the options, or else by the environment.

    Raises:
        UsageError: neither names one, or the URL cannot be read.
    """
    from txbox_cli.settings import Settings

    settings = Settings()
    text = url or (settings.database_url.get_secret_value() if settings.database_url else None)
    if not text:
        raise UsageError(f"no database is named; give --url or set {DATABASE_URL_VARIABLE} (`txbox dev` starts one)")
    given = [("--schema", schema or None), ("--prefix", prefix)]
    return DatabaseTarget(
        read_url(text, "--url" if url else DATABASE_URL_VARIABLE),
        schema or settings.database_schema,
        settings.table_prefix if prefix is None else prefix,
        " ".join(f"{option} {shlex.quote(value)}" for option, value in given if value is not None),
    )


Command = TypeVar("Command", bound=Callable[..., Any])
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ReadBy:
    """Marks a parameter of a command that ``reader`` reads from several options: the parameters of ``reader``."""

    reader: Callable[..., object]
    options: Mapping[str, inspect.Parameter] | None = None
    """Used in place of the reader's own parameters."""


ANYWHERE = ("debug", "log_level", "log_format")
"""Options of the program that may also stand after a command."""


class Commands(typer.Typer):
    """A group of commands whose parameters may be read from several options (``ReadBy``).

    A command added by ``later`` is imported only when it is used: ``--help`` and the other commands do not wait for it.
    """

    def __init__(self, **options: Any) -> None:
        """``options`` are those of ``typer.Typer``."""
        self.origins: dict[str, Origin] = {}
        group = type("Group", (CommandGroup,), {"origins": self.origins})
        super().__init__(
            cls=group,
            add_completion=False,
            pretty_exceptions_enable=False,
            rich_markup_mode=None,  # its panels break lines in the middle of a paragraph and truncate long words
            **options,
        )

    def command(self, *args: Any, **kwargs: Any) -> Callable[[Command], Command]:
        register = super().command(*args, **kwargs)

        def add(command: Command) -> Command:
            register(with_options(command))
            return command

        return add

    def later(
        self,
        name: str,
        module: str,
        short_help: str,
        *,
        attribute: str = "",
        change: str = "",
    ) -> None:
        """Register a command or a group that is imported when it is used.

        Args:
            short_help: its line in the list of commands, at 80 columns.
            attribute: the function or the ``Commands`` in the module, unless it is named as the command is.
            change: a function of the module that changes typer's command.
        """
        self.origins[name] = Origin(module, attribute or name.replace("-", "_"), short_help, change)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a command is defined, and its line in the list of commands."""

    module: str
    attribute: str
    short_help: str
    change: str = ""

    def load(self, name: str) -> Any:
        """Import the command and convert it into one of typer's."""
        found = getattr(import_module(self.module), self.attribute)
        if isinstance(found, Commands):
            group = typer.main.get_group(found)
            group.name, group.short_help = name, self.short_help
            return group
        alone = Commands()
        alone.command(name, short_help=self.short_help)(found)
        command = typer.main.get_command(alone)
        if self.change:
            getattr(import_module(self.module), self.change)(command)
        return command


class CommandGroup(TyperGroup):
    """A group of commands, some not imported yet. The options in ``ANYWHERE`` may also stand after a command."""

    origins: Mapping[str, Origin]

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = cast(Any, LoadedCommands(self, self.commands))

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - typer's
        return list(self.commands)

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - typer's
        """Write the list of commands without importing them."""
        loaded = (
            (name, self.commands[name].get_short_help_str()) for name in self.commands if name not in self.origins
        )
        with formatter.section("Commands"):
            formatter.write_dl([*loaded, *((name, origin.short_help) for name, origin in self.origins.items())])


class LoadedCommands(Mapping[str, Any]):
    """A group's commands by name. A lookup imports the command and adds the options in ``ANYWHERE``."""

    def __init__(self, group: CommandGroup, registered: Mapping[str, Any]) -> None:
        self._group = group
        self._registered = registered
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            origins = self._group.origins
            command = origins[name].load(name) if name in origins else self._registered[name]
            command.params.extend(option for option in self._group.params if option.name in ANYWHERE)
            self._made[name] = command
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._registered
        yield from self._group.origins

    def __len__(self) -> int:
        return len(self._registered) + len(self._group.origins)


def with_options(command: Callable[..., Result]) -> Callable[..., Result]:
    """Replace each parameter marked with ``ReadBy`` by the options of its reader."""
    own = inspect.signature(command).parameters.values()
    marks = {one.name: mark for one in own for mark in _marks(one) if isinstance(mark, ReadBy)}
    readers = {name: mark.reader for name, mark in marks.items()}
    options = {name: mark.options or inspect.signature(mark.reader).parameters for name, mark in marks.items()}

    @wraps(command)
    def run(**given: Any) -> Result:
        for name, reader in readers.items():
            given[name] = reader(**{option: given.pop(option) for option in options[name]})
        return command(**given)

    parameters = [each for one in own for each in (options[one.name].values() if one.name in options else [one])]
    by_name = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    run.__signature__ = inspect.signature(command).replace(parameters=by_name)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _marks(parameter: inspect.Parameter) -> tuple[object, ...]:
    return getattr(parameter.annotation, "__metadata__", ())


DatabaseOptions = Annotated[DatabaseTarget, ReadBy(database)]


def read_url(text: str, origin: str = "--url") -> "URL":
    """Read a database URL. ``origin`` is the option or variable that it came from.

    Raises:
        UsageError: it is not the URL of a Postgres database.
    """
    try:
        return database_url(text)
    except InvalidConfiguration as error:
        raise UsageError(f"{origin}: {error}") from error


def checked_queue_url(parameter: typer.CallbackParam, text: str | None) -> str | None:
    """Return the URL of an SQS queue given as an option; a typer callback. A queue's name alone is refused.

    Raises:
        UsageError: it is not such a URL.
    """
    if text is not None and not re.fullmatch(r"https?://[^/\s]+/\d+/[\w.-]+", text):
        name = parameter.opts[0] if parameter.param_type_name == "option" else "URL"
        raise UsageError(f"{name} must be the URL of a queue, https://HOST/ACCOUNT/NAME, not {text!r}")
    return text


def checked_queue(parameter: typer.CallbackParam, text: str | None) -> str | None:
    """Return the queue given as an option: an SQS URL, or ``scheme:rest`` of another broker; a typer callback.

    Raises:
        UsageError: it is neither, or no installed package has such queues.
    """
    if text is None or not re.match(r"(?!https?:)[a-z][a-z0-9+.-]*:\S", text):
        return checked_queue_url(parameter, text)
    from txbox_workers.brokers import broker_entry

    try:
        broker_entry(text)
    except InvalidConfiguration as error:
        raise UsageError(f"{parameter.opts[0]}: {error}") from error
    return text


def checked_queues(parameter: typer.CallbackParam, texts: list[str] | None) -> list[str]:
    """Return the queues of a repeatable option, each once. Raises as ``checked_queue``."""
    queues = (checked_queue(parameter, text) for text in texts or ())
    return list(dict.fromkeys(queue for queue in queues if queue is not None))


def this_user() -> str:
    """Return user@host of this process, to record who asked for something."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run under a number that has no name
        user = "unknown"
    return f"{user}@{host_name()}"


def read_span(option: str, text: str) -> timedelta:
    """Read a span of time: numbers with units, such as 90s, 30m, 1h30m, 7d or 2w.

    Raises:
        UsageError: it is not a span, is zero, or is longer than ``LONGEST_SPAN``.
    """
    parts = re.findall(_PART, text) if re.fullmatch(rf"\s*(?:{_PART})+\s*", text) else []
    try:
        span = sum((timedelta(**{_UNITS[unit.lower()]: float(number)}) for number, unit in parts), timedelta(0))
    except OverflowError:
        span = timedelta.max
    if not timedelta(0) < span <= LONGEST_SPAN:
        raise UsageError(f"{option} must be a span of time, such as 90s, 30m, 12h, 7d or 2w, not {text!r}")
    return span


def read_moment(option: str, text: str) -> datetime | timedelta:
    """Read a moment: an ISO 8601 time with its zone, or a span, which means that long ago.

    Raises:
        UsageError: it is neither.
    """
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        moment = None
    if moment is not None and moment.tzinfo is not None:
        return moment
    if moment is not None:
        raise UsageError(f"{option} needs a zone: {moment.isoformat()}Z is in UTC, {moment.isoformat()}+01:00 is not")
    try:
        return read_span(option, text)
    except UsageError as error:
        raise UsageError(
            f"{option} must be a time with its zone, such as 2026-03-01T08:00Z, or how long ago, such as 90s, 30m, "
            f"12h, 7d or 2w, not {text!r}"
        ) from error


def require_order(since: datetime | timedelta | None, until: datetime | timedelta | None) -> None:
    """Raise unless ``until`` is after ``since``: otherwise nothing lies between them.

    Raises:
        UsageError: ``until`` is not after ``since``.
    """
    if since is None or until is None:
        return
    now = datetime.now(UTC)
    begin, end = (now - moment if isinstance(moment, timedelta) else moment for moment in (since, until))
    if end <= begin:
        raise UsageError("--until is not after --since, so there is nothing between them; exchange them?")


UPGRADE = "`txbox db upgrade`"
"""As errors about missing tables name it. A framework's adapter may have them name another command."""

# Not M: as a month it would be meant for much longer.
_PART = r"(\d+(?:\.\d+)?)([smhdwSHDW])"
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
