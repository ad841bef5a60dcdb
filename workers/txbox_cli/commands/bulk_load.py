"""``txbox bulk-load``: events from files or tables through the same inbox that the live workers use."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from txbox import InvalidConfiguration, Outbox, SqlEffect
from txbox.effects import Upsert
from txbox.effects.fields import read_fields
from txbox_cli import spark
from txbox_cli.errors import Interrupted, UsageError
from txbox_cli.importer import find
from txbox_cli.options import DatabaseOptions, JsonOption, PublishToOption
from txbox_cli.output import print_counts, print_json, printable
from txbox_cli.settings import is_submitted
from txbox_cli.signals import terminated_as_interrupt

if TYPE_CHECKING:
    from txbox_spark import BulkLoadReport, LoadPlan, RejectedCause

REJECTED_STATUS = 3
"""The exit status if rows were rejected, and every other event is applied."""

MEANT_AS_NULL = ("NA", "N/A", "n/a", "NULL", "null", "None", "NaN", "nan", "-", "\\N", "?")
"""Texts that files of CSV have where they have no value."""


def bulk_load(
    *,
    events: spark.EventsOptions,
    subscriber: spark.SubscriberOption,
    message_id: spark.MessageIdOption,
    apply: Annotated[
        Path | None,
        typer.Option("--apply", metavar="FILE.sql", help="The effect: statements over the relation fresh_event."),
    ] = None,
    call: Annotated[
        str | None,
        typer.Option(
            "--call",
            metavar="MODULE:NAME",
            help="The effect, in place of --apply: a function that is given a connection.",
        ),
    ] = None,
    upsert_into: Annotated[
        str | None,
        typer.Option(
            "--upsert-into",
            metavar="TABLE",
            help="The effect, in place of --apply: events are rows of this table, or replace those of the same key.",
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="With --upsert-into: a unique key's columns; by default the primary key's."),
    ] = None,
    only_if: Annotated[
        str | None,
        typer.Option(
            metavar="newer:COLUMN",
            help="With --upsert-into: replace a row only if the event has more in this column, such as updated_at.",
        ),
    ] = None,
    ignore_columns: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="With --upsert-into: columns of the events that are not written."),
    ] = None,
    publish_to: PublishToOption = None,
    db: DatabaseOptions,
    fields: spark.FieldsOption = None,
    types: Annotated[
        list[str] | None,
        typer.Option("--type", metavar="COLUMN=TYPE", help="A column's type in Postgres: payload=jsonb. Repeatable."),
    ] = None,
    writer: Annotated[
        str,
        typer.Option(help="copy: tasks COPY and merge; jdbc: over a staging table; auto: copy where executors can."),
    ] = "auto",
    parallelism: Annotated[
        int | None, typer.Option(help="Chunks merged at once; by default as many as Spark runs tasks.", min=1)
    ] = None,
    chunk_rows: Annotated[
        int | None,
        typer.Option(help="Rows that a transaction merges, about, at most; by default 1000000.", min=1),
    ] = None,
    lock_seconds: Annotated[
        float | None,
        typer.Option(help="How long a transaction holds locks, about; by default 0.5. Longer is faster."),
    ] = None,
    stalled_seconds: Annotated[
        float | None,
        typer.Option(help="How long a chunk's transaction may do nothing, or wait for a lock; by default 120."),
    ] = None,
    effects_seconds: Annotated[
        float | None,
        typer.Option(help="How long a chunk waits while one and the same other one applies events; by default 3600."),
    ] = None,
    executor_seconds: Annotated[
        float | None,
        typer.Option(help="How long to wait for an executor of a cluster while there is none; by default 600."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Take statements that do not name fresh_event: a function of yours may.")
    ] = False,
    sent_at: Annotated[
        str | None,
        typer.Option("--sent-at", metavar="COLUMN", help="When an event was sent; too old ones are not applied."),
    ] = None,
    apply_expired: Annotated[
        bool, typer.Option("--apply-expired", help="Apply also what is too old to tell whether it was processed.")
    ] = False,
    rejected_to: Annotated[
        str | None,
        typer.Option(
            "--rejected-to",
            metavar="FOLDER|table:NAME",
            help="Keep all rejected rows, each with its cause: as lines of JSON, or in a table of Postgres.",
        ),
    ] = None,
    max_rejected: Annotated[
        str | None,
        typer.Option("--max-rejected", metavar="N|P%", help="Fail if more rows are rejected: 100, or 2.5%."),
    ] = None,
    allow_rejected: Annotated[
        bool, typer.Option("--allow-rejected", help="Exit with 0 if rows were rejected and the others are applied.")
    ] = False,
    keep: Annotated[
        str,
        typer.Option(
            metavar="any|latest:COLUMN|earliest:COLUMN", help="Which of several rows with one message id is taken."
        ),
    ] = "any",
    resume: Annotated[
        str | None, typer.Option(metavar="RUN", help="Finish this run in place of beginning one.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Judge and count the events, and explain the effect; change nothing.")
    ] = False,
    master: spark.MasterOption = None,
    jdbc_jar: spark.JarOption = None,
    conf: spark.ConfOption = None,
    as_json: JsonOption = False,
) -> None:
    """Apply every event of files or tables once, by Spark, whatever live workers have applied or are applying.

    Events are cut into chunks by message id. A transaction merges one chunk or more: ids that are first go into the
    inbox, and the effect is applied to their events, in the relation fresh_event. So the command may be killed,
    repeated, and run beside workers; --resume leaves out the chunks that are done.

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
    outbox = None if publish_to is None else Outbox(schema=db.schema, prefix=db.prefix)
    mapped_fields = None if types or force else fields
    effect: Effect
    if upsert_into is not None:
        if apply is not None or call is not None:
            raise UsageError("--upsert-into is the effect; leave --apply and --call out, or it")
        effect = _upsert(upsert_into, key, only_if, ignore_columns, mapped_fields)
    elif key or only_if or ignore_columns:
        raise UsageError("--key, --only-if and --ignore-columns go with --upsert-into TABLE")
    else:
        effect = _effect(apply, call, mapped_fields, outbox, publish_to)
    if outbox is not None and not isinstance(effect, SqlEffect):
        raise UsageError(
            "--publish-to goes with --apply and --fields, such as --fields 'customer_id text, cents bigint', and "
            "without --type and --force; a function of yours publishes by itself"
        )
    if dry_run and resume is not None:
        raise UsageError("--dry-run is of a load that begins; leave --resume out, or it")
    column_types = spark.pairs("--type", types)
    from txbox_spark import bulk_load as load_events
    from txbox_spark import plan_load, source_of
    from txbox_spark.merging.merge_plan import EFFECTS_SECONDS, STALLED_SECONDS
    from txbox_spark.merging.merge_sizer import LOCK_SECONDS
    from txbox_spark.options import CHUNK_ROWS, WRITERS, is_limit
    from txbox_spark.reading.row_order import is_known
    from txbox_spark.runtime.executor_watcher import EXECUTOR_SECONDS

    bound = executor_seconds or EXECUTOR_SECONDS
    if writer not in WRITERS:
        raise UsageError(f"--writer must be one of {', '.join(WRITERS)}, not {writer!r}")
    if not is_known(keep):
        raise UsageError(f"--keep must be any, latest:COLUMN or earliest:COLUMN, not {keep!r}")
    if max_rejected is not None and not is_limit(max_rejected):
        raise UsageError(f"--max-rejected must be a number of rows, or a percentage such as 2.5%, not {max_rejected!r}")
    mapped = effect.fields if isinstance(effect, SqlEffect) else None
    upsert = effect if isinstance(effect, Upsert) else None
    if upsert is not None:
        mapped = upsert.typed_fields
    if isinstance(effect, str) and not force and "fresh_event" not in effect.lower():
        raise UsageError(
            f"{apply} does not name fresh_event, so the events would be recorded without effect; if that is meant, or "
            "a function does it, give --force"
        )
    if events.source is not None and fields is not None and mapped is None:
        raise UsageError(
            "--fields of a --source are those of --apply, in types that a worker has, without --type and --force"
        )
    spark.check_before_spark(db, events, master, ledger=True, resume=resume, upsert=upsert)
    load: Callable[..., BulkLoadReport | LoadPlan]  # their other arguments are the same
    load = plan_load if dry_run else partial(load_events, resume=resume)
    run = spark.CurrentRun()
    try:
        with (
            terminated_as_interrupt(),
            spark.session(
                "txbox bulk-load", master, jdbc_jar, conf, spark.java_options(events.paths, master)
            ) as session,
            spark.progress_display(run, silent=as_json and is_submitted()) as show,
        ):
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
                apply=effect,
                schema=db.schema,
                prefix=db.prefix,
                column_types=column_types,
                writer=writer,
                parallelism=parallelism,
                chunk_rows=chunk_rows or CHUNK_ROWS,
                lock_seconds=lock_seconds or LOCK_SECONDS,
                source=source or source_of(session, events.paths, options=events.options, executor_seconds=bound),
                on_progress=show,
                stalled_seconds=stalled_seconds or STALLED_SECONDS,
                effects_seconds=effects_seconds or EFFECTS_SECONDS,
                executor_seconds=bound,
                force=force,
                sent_at=sent_at,
                apply_expired=apply_expired,
                rejected_to=rejected_to,
                max_rejected=max_rejected,
                keep=keep,
            )
    except KeyboardInterrupt:
        if run.run_id is None:
            raise
        raise Interrupted(f"interrupted; finish it with --resume {run.run_id}, or run it again") from None
    if as_json:
        print_json(report.as_dict())
    else:
        _print(
            report, keep, call, of_csv=events.format == "csv" or any(".csv" in path.lower() for path in events.paths)
        )
    if report.rejected and not (dry_run or allow_rejected):
        raise typer.Exit(REJECTED_STATUS)


Effect = str | SqlEffect | Upsert | Callable[..., object]


def _upsert(table: str, key: str | None, only_if: str | None, ignored: str | None, fields: str | None) -> Upsert:
    what, _, newer = (only_if or "").partition(":")
    if only_if is not None and not (what == "newer" and newer):
        raise UsageError(f"--only-if takes newer:COLUMN, not {only_if!r}")
    return Upsert(
        table,
        key=None if key is None else _names(key),
        only_if_newer=newer or None,
        ignore_columns=() if ignored is None else _names(ignored),
        fields=read_fields(fields) if fields is not None and _are_fields(fields) else None,
    )


def _names(given: str) -> list[str]:
    return [name.strip() for name in given.split(",")]


def _effect(
    apply: Path | None, call: str | None, fields: str | None, outbox: Outbox | None, destination: str | None
) -> Effect:
    if (apply is None) == (call is None):
        raise UsageError("name the effect: --apply FILE.sql, --call MODULE:NAME, or --upsert-into TABLE")
    if apply is not None:
        statements = apply.read_text()
        if not statements.strip():
            raise UsageError(f"--apply: {apply} is empty")
        if fields is None or not _are_fields(fields):
            return statements
        return SqlEffect(apply, fields=fields, outbox=outbox, destination=destination)
    module, name = find(str(call), such_as="billing:apply")
    found: Callable[..., object] | None = getattr(module, name, None)
    if not callable(found):
        raise UsageError(f"--call: module {module.__name__} has no function {name}")
    return found


def _are_fields(fields: str) -> bool:
    """Whether they are those of an effect; otherwise they are columns of types that only Spark has."""
    try:
        read_fields(fields)
    except InvalidConfiguration:
        return False
    return True


def _described(cause: "RejectedCause", *, of_csv: bool) -> str:
    """Describe the rows that were rejected for one cause: the row, or how many, and one of them."""
    if cause.rows == 1:
        return f"{cause.cause}: {cause.example}"
    value = "" if cause.value is None else f": {cause.value!r}"
    hint = f"; --read-option nullValue={cause.value}?" if of_csv and cause.value in MEANT_AS_NULL else ""
    return f"{cause.rows:,} rows: {cause.cause}{value}{hint}, such as {cause.example}"


def _print(report: "BulkLoadReport | LoadPlan", keep: str, call: str | None, *, of_csv: bool) -> None:
    from txbox_spark import LoadPlan

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


def _print_statements(plan: "LoadPlan", call: str | None) -> None:
    for one in plan.statements:
        statement = printable(one.statement, keep="\n")
        typer.echo(f"\n{statement}\n")
        for line in ("not explained: EXPLAIN does not take it, or one before it",) if one.plan is None else one.plan:
            typer.echo(f"  {printable(line)}")
    typer.echo("" if plan.statements else f"the effect is {call}, which is not run")
    typer.echo(f"dry run, nothing is changed: {plan.chunks} chunks, writer {plan.writer} ({plan.writer_reason})")
