"""``txbox audit``: prove that what an outbox has sent is in an inbox, and that the inbox balances."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from sqlalchemy import Engine

from txbox.errors import NothingKept
from txbox.operations.actions import AUDIT, note_action
from txbox.operations.audit import AuditReport, Finding, FindingKind, Stretch
from txbox.operations.audit import audit as compare
from txbox.operations.audit import audit_inbox as balance
from txbox.operations.audit.report import COUNTS, FAULTS_OF_SENT
from txbox_cli import spark
from txbox_cli.errors import CommandFailed, UsageError
from txbox_cli.options import (
    DatabaseTarget,
    JsonOption,
    PrefixOption,
    SchemaOption,
    UrlOption,
    database,
    read_moment,
    read_span,
    this_user,
)
from txbox_cli.output import counted, print_counts, print_json, printable
from txbox_cli.signals import terminated_as_interrupt

if TYPE_CHECKING:
    from txbox_spark import Reconciliation

SHOWN_STRETCHES = 5


def audit(
    destinations: Annotated[
        list[str] | None,
        typer.Option("--destination", help="Where the outbox has sent to; again for others of the same subscriber."),
    ] = None,
    subscriber: Annotated[str | None, typer.Option("--subscriber", help="Whose inbox.")] = None,
    url: UrlOption = None,
    schema: SchemaOption = None,
    prefix: PrefixOption = None,
    inbox_url: Annotated[
        str | None, typer.Option("--inbox-url", help="The inbox's database; without it, the same.")
    ] = None,
    inbox_schema: Annotated[
        str | None, typer.Option("--inbox-schema", help="The schema of its tables; without it, as --schema.")
    ] = None,
    inbox_prefix: Annotated[
        str | None, typer.Option("--inbox-prefix", help="What its tables' names start with; without it, as --prefix.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="TIME",
            help="Only ids (UUIDs of version 7) made then or later: 2026-03-01T08:00Z, or how long ago: 2h, 7d.",
        ),
    ] = None,
    in_flight: Annotated[
        str,
        typer.Option("--in-flight", metavar="SPAN", help="What was sent less than this ago may still be on its way."),
    ] = "15m",
    shared: Annotated[
        bool, typer.Option("--shared", help="Others send to this subscriber, too: no id in the inbox is foreign.")
    ] = False,
    inbox_only: Annotated[
        bool, typer.Option("--inbox-only", help="Balance the inbox by itself, as without --destination.")
    ] = False,
    record: Annotated[
        bool,
        typer.Option("--record", help="Put the result on record in the inbox's database; `txbox dashboard` shows it."),
    ] = False,
    limit: Annotated[int, typer.Option("--limit", help="How many messages to name.", min=0, max=100_000)] = 100,
    archive: Annotated[
        str | None,
        typer.Option(
            "--archive",
            metavar="FOLDER",
            help="Also what the outbox's database has moved there by `txbox archive`; a Spark job.",
        ),
    ] = None,
    inbox_archive: Annotated[
        str | None,
        typer.Option("--inbox-archive", metavar="FOLDER", help="That of the inbox's database; without it, the same."),
    ] = None,
    *,
    on: spark.Runtime,
    as_json: JsonOption = False,
) -> int:
    """Prove that every message that was sent is processed or parked, and that no other is.

    Compares the messages that an outbox has sent, and keeps (`txbox relay --keep-sent 7d`), with the inbox of the
    subscriber that receives them, by counts and digests. Where these differ, it names the messages. A message that is
    missing is lost, or waits in a queue whose backlog is older than --in-flight; so is one that is overdue: it failed,
    or a lease of it ran out, and it did not come again within --in-flight and 15 minutes, the longest pause of a retry.
    What cannot be judged is counted, and said: what is too young, what the outbox does not keep any more, what the
    inbox may have forgotten.

    Without --destination, or with --inbox-only: does each inbox balance by itself? Recorded = processed + parked +
    expired + discarded; and each dead letter that waits is parked in the inbox, under its number. What was sent is not
    compared, so no lost message is found.

    With --archive: every message that the archive has as sent is in the inbox, or was, as the archive says.

    Reads only, a little at a time, also from a replica; --record writes one row. Exit status 0: balanced. 1: it is not,
    or for a destination there was nothing to compare.
    """
    alone = inbox_only or not destinations
    if not alone and subscriber is None:
        raise UsageError("--subscriber is missing: whose inbox is to be compared with --destination?")
    if alone and shared:
        raise UsageError("--shared is for an audit with --destination")
    begin = None if since is None else read_moment("--since", since)
    if archive is None and inbox_archive is not None:
        raise UsageError("--inbox-archive goes with --archive")
    if archive is not None and alone:
        raise UsageError("--archive is for an audit with --destination")
    span = read_span("--in-flight", in_flight)
    outbox = database(url, schema, prefix)
    inbox = database(inbox_url or url, inbox_schema or schema, inbox_prefix if inbox_prefix is not None else prefix)
    archived = None
    with ExitStack() as stack:
        recorded = stack.enter_context(inbox.engine())
        if alone:
            reports = balance(recorded, subscriber, schema=inbox.schema, prefix=inbox.prefix, since=begin, limit=limit)
            if subscriber is not None and not reports:
                raise CommandFailed(
                    f"no subscriber {subscriber} has left a trace here; `txbox status` shows those that have"
                )
        else:
            try:
                report = compare(
                    stack.enter_context(outbox.engine()),
                    destinations or (),
                    recorded,
                    subscriber or "",
                    outbox_schema=outbox.schema,
                    outbox_prefix=outbox.prefix,
                    inbox_schema=inbox.schema,
                    inbox_prefix=inbox.prefix,
                    since=begin,
                    in_flight=span,
                    shared=shared,
                    limit=limit,
                )
            except NothingKept:
                if archive is None:
                    raise
                report = _nothing_kept(subscriber or "", destinations or ())
            if archive is not None:
                with terminated_as_interrupt(), spark.session("txbox audit", on) as session:
                    archived, also = _compare_archive(
                        session, archive, inbox_archive or archive, inbox, destinations or (), subscriber or "", limit
                    )
                report = replace(report, not_compared=tuple(name for name in report.not_compared if name not in also))
            if report.not_compared and not report.faults:
                raise CommandFailed(_not_compared(report))
            reports = [report]
        if record:
            _record(recorded, inbox, reports)
    balanced = all(report.balanced for report in reports) and (archived is None or not _missing(archived))
    if as_json:
        one = {**reports[0].as_dict(), "balanced": balanced}
        print_json(
            [report.as_dict() for report in reports]
            if alone
            else one
            if archived is None
            else {**one, "archive": archived.as_dict()}
        )
        return 0 if balanced else 1
    for report in reports:
        _print(report)
    if archived is not None:
        _print_archived(archive or "", archived)
    if not reports:
        typer.echo(_NOT_SENT)
        typer.echo("balanced: the inbox is empty")
    return 0 if balanced else 1


def _nothing_kept(subscriber: str, destinations: Sequence[str]) -> AuditReport:
    """Return the report of an outbox that keeps nothing: only an archive knows what it has sent."""
    named = tuple(destinations)
    return AuditReport(
        subscriber, named, dict.fromkeys(COUNTS, 0), not_compared=named, compared_since=datetime.now(UTC)
    )


def _compare_archive(
    session: Any,
    archive: str,
    inbox_archive: str,
    inbox: DatabaseTarget,
    destinations: Sequence[str],
    subscriber: str,
    limit: int,
) -> "tuple[Reconciliation, set[str]]":
    """Compare an archive with the inbox. Return the result, and which of the destinations the archive has."""
    from txbox_spark import read_archive, reconcile

    sent = read_archive(session, archive).sent(destinations)
    found = reconcile(
        sent,
        url=inbox.url,
        subscriber_id=subscriber,
        message_id="message_id",
        schema=inbox.schema,
        prefix=inbox.prefix,
        forgotten=inbox_archive,
        sample=limit,
    )
    return found, {row[0] for row in sent.select("destination").distinct().collect()}


def _print_archived(archive: str, found: "Reconciliation") -> None:
    typer.echo(printable(f"the archive {archive}"))
    rows = [
        ("sent", found.archived, "different ids in the archive"),
        ("parked", found.parked, "of them, that wait as dead letters"),
        ("expired", found.expired, "of them, that came too late and wait"),
        ("discarded", found.discarded, "of them, that a person gave up"),
        ("missing", _missing(found), "of them, that were never processed"),
    ]
    print_counts(rows)
    for message_id in found.never_processed_sample:
        typer.echo(f"not processed, in the archive: {printable(message_id)}")
    if _missing(found):
        typer.echo(f"NOT BALANCED: {counted(_missing(found), 'message')} of the archive")


def _missing(found: "Reconciliation") -> int:
    return found.never_processed - found.parked - found.expired - found.discarded


def _record(engine: Engine, inbox: DatabaseTarget, reports: Sequence[AuditReport]) -> None:
    with engine.begin() as connection:
        for report in reports:
            detail = {
                "balanced": report.balanced,
                "seconds": round(report.seconds, 3),
                "destinations": list(report.destinations),
                "counts": {name: count for name, count in report.counts.items() if count},
            }
            note_action(
                connection,
                AUDIT,
                report.subscriber_id,
                by=this_user(),
                detail=detail,
                schema=inbox.schema,
                prefix=inbox.prefix,
            )


def _print(report: AuditReport) -> None:
    source = f"{', '.join(report.destinations)} → " if report.destinations else ""
    typer.echo(printable(f"{source}{report.subscriber_id}"))
    print_counts([(name.replace("_", " "), report.counts[name], COUNTS[name]) for name in _shown(report)])
    for finding in report.findings:
        typer.echo(printable(_named(finding)))
    listed = sum(report.counts[kind] for kind in FindingKind)
    if listed > len(report.findings):
        typer.echo(f"{listed - len(report.findings):,} more are not named; see --limit")
    for stretch in report.differing[:SHOWN_STRETCHES]:
        typer.echo(printable(_stretch(stretch)))
    if report.not_compared:
        typer.echo(printable(_not_compared(report)))
    if report.not_judged:
        typer.echo(_NOT_SENT)
    if report.kept_since is not None:
        limits = [f"sent messages are kept since {report.kept_since:%Y-%m-%d %H:%M:%S}"]
        if report.horizon is not None:
            limits.append(f"the inbox forgets what is older than {report.horizon:%Y-%m-%d %H:%M:%S}")
        typer.echo("; ".join(limits))
    faults = f"NOT BALANCED: {counted(report.faults, 'fault')}"
    compared = f"{counted(report.stretches, 'stretch', 'stretches')} in {report.seconds:.1f} s"
    typer.echo(f"{'balanced' if report.balanced else faults}; {compared}")


def _not_compared(report: AuditReport) -> str:
    where, since = ", ".join(report.not_compared), report.compared_since
    return (
        f"nothing was compared for {where}: nothing was sent there since {since:%Y-%m-%d %H:%M:%S}, as far back as "
        "this audit can judge; name the destination as it was published, give an earlier --since, or leave it out"
    )


def _shown(report: AuditReport) -> list[str]:
    always: tuple[str, ...] = ("processed", "parked")
    if report.destinations:
        always = ("sent", *always, "missing", "foreign", "doubled")
    return [name for name in COUNTS if report.counts[name] or name in always]


def _named(finding: Finding) -> str:
    at = "" if finding.at is None else f", {_VERBS[finding.kind]} {finding.at:%Y-%m-%d %H:%M:%S}"
    return f"{finding.kind.value.replace('_', ' ')}: {finding.message_id}{at}"


def _stretch(stretch: Stretch) -> str:
    if stretch.since is not None and stretch.until is not None:
        where = f"{stretch.since:%Y-%m-%d %H:%M:%S} to {stretch.until:%Y-%m-%d %H:%M:%S}"
    else:
        where = f"ids after {stretch.after!r} to {stretch.last!r}"
    faults = ", ".join(f"{count:,} {kind.replace('_', ' ')}" for kind, count in stretch.faults.items())
    return f"differs: {where}: {stretch.sent:,} sent, {stretch.recorded:,} in the inbox: {faults}"


_NOT_SENT = (
    f"not compared with what was sent: messages that are {', '.join(FAULTS_OF_SENT[:-1])} or {FAULTS_OF_SENT[-1]} are "
    "not found; name where it was sent, with --destination and --subscriber"
)

_VERBS: dict[Any, str] = {
    FindingKind.MISSING: "sent",
    FindingKind.OVERDUE: "sent",
    FindingKind.SENT_AGAIN: "sent last",
    FindingKind.FOREIGN: "processed",
    FindingKind.DOUBLED: "processed",
    FindingKind.UNPARKED: "parked",
    FindingKind.UNRECORDED: "parked",
    FindingKind.PROCESSED_SINCE: "parked",
}
