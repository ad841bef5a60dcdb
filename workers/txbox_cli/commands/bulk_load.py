"""``txbox bulk-load``: apply events from files or tables through the inbox that live workers use."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

import txbox_spark
from txbox import InvalidConfiguration, Outbox, SqlEffect
from txbox.effects import Upsert
from txbox.effects.fields import read_fields
from txbox_cli import spark
from txbox_cli.commands.loads import run_to_resume
from txbox_cli.errors import CommandFailed, Interrupted, UsageError
from txbox_cli.importer import find
from txbox_cli.options import DatabaseOptions, DatabaseTarget, JsonOption, PublishToOption, ReadBy
from txbox_cli.output import print_counts, print_json, printable
from txbox_spark import BulkLoadReport, LoadPlan, RejectedCause
from txbox_spark.options import Option, fields_of, text_options
from txbox_spark.runtime.executor_watcher import EXECUTOR_SECONDS

REJECTED_STATUS = 3
"""The exit status if rows were rejected and every other event is applied."""

MEANT_AS_NULL = ("NA", "N/A", "n/a", "NULL", "null", "None", "NaN", "nan", "-", "\\N", "?")
"""Texts that stand for a missing value in CSV files."""

_ABOUT_TEXTS = re.compile(
    r"\(.*\btext\b.*\) does not exist|operator does not exist: .*\btext\b|but expression is of type text"
    r"|types .*\btext\b.* cannot be matched"
)
"""What Postgres says of a sum of texts, or of texts for a column of numbers. Executors send no SQLSTATE."""

Effect = str | SqlEffect | Upsert | Callable[..., object]


@dataclass(frozen=True, slots=True)
class EffectOptions:
    """The options that name the effect."""

    apply: Annotated[
        Path | None,
        typer.Option("--apply", metavar="FILE.sql", help="The effect: statements over the relation fresh_event."),
    ] = None
    call: Annotated[
        str | None,
        typer.Option(
            "--call",
            metavar="MODULE:NAME",
            help="The effect, in place of --apply: a function that is given a connection.",
        ),
    ] = None
    upsert_into: Annotated[
        str | None,
        typer.Option(
            "--upsert-into",
            metavar="TABLE",
            help="The effect, in place of --apply: events are rows of this table, or replace those of the same key.",
        ),
    ] = None
    key: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="With --upsert-into: a unique key's columns; by default the primary key's."),
    ] = None
    only_if: Annotated[
        str | None,
        typer.Option(
            metavar="newer:COLUMN",
            help="With --upsert-into: replace a row only if the event has more in this column, such as updated_at.",
        ),
    ] = None
    ignore_columns: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="With --upsert-into: columns of the events that are not written."),
    ] = None
    publish_to: PublishToOption = None

    def effect(self, fields: str | None, db: DatabaseTarget) -> Effect:
        """Return the effect that the options name.

        Args:
            fields: the events' fields, unless their columns have types of their own.
            db: the database whose outbox the effect publishes in.

        Raises:
            UsageError: there is none or more than one, or an option belongs to another one.
        """
        outbox = None if self.publish_to is None else Outbox(schema=db.schema, prefix=db.prefix)
        if self.upsert_into is not None:
            if self.apply is not None or self.call is not None:
                raise UsageError("--upsert-into is the effect; leave --apply and --call out, or it")
            effect: Effect = self._upsert(self.upsert_into, fields)
        elif self.key or self.only_if or self.ignore_columns:
            raise UsageError("--key, --only-if and --ignore-columns go with --upsert-into TABLE")
        elif (self.apply is None) == (self.call is None):
            raise UsageError("name the effect: --apply FILE.sql, --call MODULE:NAME, or --upsert-into TABLE")
        else:
            effect = self._called() if self.apply is None else self._statements(self.apply, fields, outbox)
        if outbox is not None and not isinstance(effect, SqlEffect):
            raise UsageError(
                "--publish-to goes with --apply and --fields, such as --fields 'customer_id text, cents bigint', and "
                "without --type and --force; a function of yours publishes by itself"
            )
        return effect

    def _upsert(self, table: str, fields: str | None) -> Upsert:
        what, _, newer = (self.only_if or "").partition(":")
        if self.only_if is not None and not (what == "newer" and newer):
            raise UsageError(f"--only-if takes newer:COLUMN, not {self.only_if!r}")
        return Upsert(
            table,
            key=None if self.key is None else _names(self.key),
            only_if_newer=newer or None,
            ignore_columns=() if self.ignore_columns is None else _names(self.ignore_columns),
            fields=read_fields(fields) if fields is not None and _are_fields(fields) else None,
        )

    def _statements(self, file: Path, fields: str | None, outbox: Outbox | None) -> Effect:
        statements = file.read_text()
        if not statements.strip():
            raise UsageError(f"--apply: {file} is empty")
        if fields is None or not _are_fields(fields):
            return statements
        return SqlEffect(file, fields=fields, outbox=outbox, destination=self.publish_to)

    def _called(self) -> Effect:
        module, name = find(str(self.call), such_as="billing:apply")
        found: Callable[..., object] | None = getattr(module, name, None)
        if not callable(found):
            raise UsageError(f"--call: module {module.__name__} has no function {name}")
        return found


def _parameter(name: str, about: Option, kind: Any, default: Any) -> inspect.Parameter:
    """Return an option of a load for typer. A number's default is only in the help: the load itself supplies it."""

    def checked(parameter: typer.CallbackParam, value: Any) -> Any:
        if problem := about.problem(parameter.opts[0], value):
            raise UsageError(problem)
        return value

    said, default = (default, default) if kind in (str, bool) else (f"{default:g}" if kind is float else default, None)
    help_ = about.help.format(said)
    flag = f"--{name.replace('_', '-')}"
    option = typer.Option(flag, metavar=about.metavar, help=help_, min=about.least, callback=checked)
    annotation: Any = Annotated[kind | None if default is None else kind, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


LoadSettings = Annotated[
    dict[str, Any], ReadBy(_given, {name: _parameter(name, *option) for name, option in text_options().items()})
]


def bulk_load(
    *,
    events: spark.EventsOptions,
    subscriber: spark.SubscriberOption,
    message_id: spark.MessageIdOption,
    effect: Annotated[EffectOptions, ReadBy(EffectOptions)],
    db: DatabaseOptions,
    fields: spark.FieldsOption = None,
    types: Annotated[
        list[str] | None,
        typer.Option("--type", metavar="COLUMN=TYPE", help="A column's type in Postgres: payload=jsonb. Repeatable."),
    ] = None,
    settings: LoadSettings,
    allow_rejected: Annotated[
        bool, typer.Option("--allow-rejected", help="Exit with 0 if rows were rejected and the others are applied.")
    ] = False,
    resume: Annotated[
        str | None, typer.Option(metavar="RUN", help="Finish this run in place of beginning one.")
    ] = None,
    new_subscriber: Annotated[
        bool,
        typer.Option("--new-subscriber", help="The inbox has ids of other subscribers, and none of this one yet."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Judge and count the events, and explain the effect; change nothing.")
    ] = False,
    on: spark.Runtime,
    as_json: JsonOption = False,
) -> None:
    """Apply every event of files or tables once, by Spark, whatever live workers have applied or are applying.

    Events are cut into chunks by message id. A transaction merges one chunk or more: ids that are first go into the
    inbox, and the effect is applied to their events, in the relation fresh_event. So the command may be killed,
    repeated, and run beside workers; --resume leaves out the chunks that are done. Ids are those of --subscriber: a
    name that the inbox does not know is refused without --new-subscriber, because each event would be new to it.

    With --fields as for `txbox worker`, the columns are those fields, judged as a worker judges them: 'customer_id text
    at /customer/id, cents bigint'. Types of Spark, such as structs, are columns as Spark reads them.

    --dry-run says what the load would come to: the counts as rows and ids tell them, the chunks, and how Postgres would
    run each statement. What Postgres refuses by a value's type or by a constraint is not tried, and counts as to apply.
    It is the way to see what --upsert-into writes.

    --upsert-into writes the statement: columns are matched by name, and cast to the table's types. An event is a whole
    row: a field that it lacks, and another event has, is written as null. Events come in no order, so of those with
    the same key the newest wins by --only-if newer:COLUMN; without it, the one that is merged last, which may be any
    of them.

    Events that were sent before the subscriber's horizon, by --sent-at or by the time in their ids (UUIDs of version
    7), may have been processed and forgotten: they are counted as expired, and not applied. With --apply-expired they
    are: say it only of events that were never processed.

    A row that cannot be loaded is rejected: one without an id, a line that cannot be read, a value that Postgres does
    not take, an event that breaks a constraint of the effect's target. The others are applied.

    Exit status 0 if every event is applied, 3 if rows were rejected and the others are applied (with --allow-rejected:
    0), 1 if the load failed, 130 if it was interrupted.

    For example:

    \b
    txbox bulk-load a.jsonl --subscriber billing --message-id id --apply a.sql

    where a.sql is:

    \b
    INSERT INTO purchase (id, cents) SELECT id, cents FROM fresh_event;
    """
    apply = effect.effect(None if types or settings["force"] else fields, db)
    if dry_run and resume is not None:
        raise UsageError("--dry-run is of a load that begins; leave --resume out, or it")
    if resume is not None:
        resume = run_to_resume(db, resume)
    settings["column_types"] = spark.pairs("--type", types)
    mapped = fields_of(apply)
    if isinstance(apply, str) and not settings["force"] and "fresh_event" not in apply.lower():
        raise UsageError(
            f"{effect.apply} does not name fresh_event, so the events would be recorded without effect; if that is "
            "meant, or a function does it, give --force"
        )
    if events.source is not None and fields is not None and mapped is None:
        raise UsageError(
            "--fields of a --source are those of --apply, in types that a worker has, without --type and --force"
        )
    known = None if new_subscriber or resume is not None else subscriber
    spark.check_before_spark(db, events, on.master, ledger=True, effect=apply, known_subscriber=known)
    load: Callable[..., BulkLoadReport | LoadPlan]  # their other arguments are the same
    load = txbox_spark.plan_load if dry_run else partial(txbox_spark.bulk_load, resume=resume)
    bound = settings.get("executor_seconds", EXECUTOR_SECONDS)
    of_csv = events.format == "csv" or any(".csv" in path.lower() for path in events.paths)
    run, java = spark.CurrentRun(), spark.java_options(events.paths, on.master)
    try:
        with spark.job("txbox bulk-load", on, as_json=as_json, java=java, run=run) as (session, show):
            frame, source = events.read(
                session,
                schema=fields if mapped is None else None,
                fields=mapped,
                message_id=message_id,
                executor_seconds=bound,
            )
            report = load(
                frame,
                url=db.url,
                subscriber_id=subscriber,
                message_id=message_id,
                apply=apply,
                schema=db.schema,
                prefix=db.prefix,
                source=source
                or txbox_spark.source_of(session, events.paths, options=events.options, executor_seconds=bound),
                on_progress=show,
                **settings,
            )
    except KeyboardInterrupt:
        if run.run_id is None:
            raise
        raise Interrupted(f"interrupted; finish it with --resume {run.run_id}, or run it again") from None
    except (txbox_spark.ApplyFailed, txbox_spark.BulkLoadFailed) as error:
        if of_csv and fields is None and _ABOUT_TEXTS.search(str(error)):
            raise CommandFailed(f"{error}; the columns of CSV are texts unless --fields gives their types") from error
        raise
    if as_json:
        print_json(report.as_dict())
    else:
        _print(report, settings["keep"], effect.call, of_csv=of_csv)
    if report.rejected and not (dry_run or allow_rejected):
        raise typer.Exit(REJECTED_STATUS)


RESUME = """Finish a run, as `txbox bulk-load --resume RUN` does; RUN stands before the paths.

It merges the chunks that are left. Name the same paths, and give the same options. It is refused if the events have
other ids, or are of other files, than those that the run was begun with. The effect may be another one: what is merged
is not merged again. Options that say how fast, such as --lock-seconds and --parallelism, may change, too.

The ledger keeps no paths and no options; `txbox loads show` says what it knows of them.

For example:

\b
txbox loads resume 4f a.jsonl b.jsonl --subscriber billing --message-id id \\
  --apply a.sql
"""


def take_run(command: Any) -> None:
    """Make `txbox bulk-load` take the run to finish as its first argument, before the paths."""
    read = command.make_context

    def make_context(*args: Any, **extra: Any) -> Any:
        context = read(*args, **extra)
        if not context.params["paths"]:
            raise UsageError("name the run: txbox loads resume RUN PATH...")
        context.params["resume"], *context.params["paths"] = context.params["paths"]
        return context

    command.make_context, command.help, command.options_metavar = make_context, RESUME, "[OPTIONS] RUN"


def _names(given: str) -> list[str]:
    return [name.strip() for name in given.split(",")]


def _are_fields(fields: str) -> bool:
    """Whether these are fields of an effect, and not columns of types that only Spark has."""
    try:
        read_fields(fields)
    except InvalidConfiguration:
        return False
    return True


def _described(cause: RejectedCause, *, of_csv: bool) -> str:
    """Describe the rows rejected for one cause: the row, or their number and an example."""
    if cause.rows == 1:
        return f"{cause.cause}: {cause.example}"
    value = "" if cause.value is None else f": {cause.value!r}"
    hint = f"; --read-option nullValue={cause.value}?" if of_csv and cause.value in MEANT_AS_NULL else ""
    return f"{cause.rows:,} rows: {cause.cause}{value}{hint}, such as {cause.example}"


def _print(report: BulkLoadReport | LoadPlan, keep: str, call: str | None, *, of_csv: bool) -> None:
    rows = [
        ("read", report.read, f"rows of {report.source}"),
        ("rejected", report.rejected, "rows that cannot be loaded"),
        ("duplicate in source", report.duplicate_in_source, "rows whose id another row has"),
        ("already processed", report.already_processed, f"events that {report.subscriber_id} had processed before"),
        *(
            [("parked", report.parked, "events that wait as dead letters: see `txbox dead-letters list`")]
            if report.parked
            else []
        ),
        *(
            [("expired", report.expired, "events sent before the horizon, and not applied: see --apply-expired")]
            if report.expired
            else []
        ),
        ("to apply", report.to_apply, "events that are first, as long as Postgres takes their values")
        if isinstance(report, LoadPlan)
        else ("applied", report.applied, "events that were first"),
    ]
    print_counts(rows)
    for cause in report.rejected_causes:
        typer.echo(f"rejected: {printable(_described(cause, of_csv=of_csv))}")
    if isinstance(report, LoadPlan):
        _print_statements(report, call)
        return
    if report.differing:
        which = "one was taken (--keep says which)" if keep == "any" else f"the {keep.replace(':', ' by ')} was taken"
        ids = ", ".join(printable(one) for one in report.differing_sample)
        typer.echo(f"{report.differing:,} ids have rows that differ, and {which}: {ids}")
    if report.rejected and report.rejected_to is not None:
        typer.echo(f"all rejected rows are in {report.rejected_to}")
    seconds = ", ".join(f"{stage} {taken:.1f} s" for stage, taken in report.seconds.items())
    attempts = "" if report.attempts == 1 else f", attempt {report.attempts}"
    typer.echo(
        f"run {report.run_id}{attempts}: {report.chunks} chunks, writer {report.writer} ({report.writer_reason})"
        + (f"; {seconds}" if seconds else "")
    )


def _print_statements(plan: LoadPlan, call: str | None) -> None:
    for one in plan.statements:
        statement = printable(one.statement, keep="\n")
        typer.echo(f"\n{statement}\n")
        for line in ("not explained: EXPLAIN does not take it, or one before it",) if one.plan is None else one.plan:
            typer.echo(f"  {printable(line)}")
    typer.echo("" if plan.statements else f"the effect is {call}, which is not run")
    typer.echo(f"dry run, nothing is changed: {plan.chunks} chunks, writer {plan.writer} ({plan.writer_reason})")
