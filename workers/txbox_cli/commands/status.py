"""``txbox status``: show what is done, what waits, and what needs a person."""

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from txbox import TxboxError
from txbox_cli.errors import explain, mask
from txbox_cli.options import DatabaseOptions, DatabaseTarget, JsonOption, checked_queue
from txbox_cli.output import counted, plain_console, print_json, print_table, printable, span
from txbox_cli.signals import terminated_as_interrupt


def watch(read: Callable[[], Callable[[], None]], seconds: float, *, headed: bool) -> None:
    """Show a report again and again until this process is asked to end, which is its usual end.

    In a terminal each report replaces the one before. An error in the first read is raised; a later one is printed, and
    the next read is tried. ``read`` reads a report and returns the function that prints it. With ``headed``, each
    report begins with the time at which it was read.
    """
    from sqlalchemy.exc import SQLAlchemyError

    console, in_terminal = plain_console(), sys.stdout.isatty()
    is_first = True
    try:
        with terminated_as_interrupt():
            while True:
                try:
                    show = read()
                except (TxboxError, SQLAlchemyError) as error:
                    if is_first:
                        raise
                    typer.echo(f"txbox: {printable(mask(explain(error)))}; next try in {seconds:g} s", err=True)
                else:
                    if in_terminal and headed:
                        console.clear()
                    if headed:
                        typer.echo(f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S}, every {seconds:g} s; Ctrl-C ends")
                    show()
                is_first = False
                time.sleep(seconds)  # a signal interrupts it
    except KeyboardInterrupt:
        return


if TYPE_CHECKING:
    from sqlalchemy import Engine

    from txbox.leases.status import LeaseStatus, LedgerStatus
    from txbox.operations.pauses import Pause
    from txbox.outbox.snapshot_holders import SnapshotHolder
    from txbox.outbox.status import DestinationStatus, OutboxStatus, RelayStatus
    from txbox.status import (
        ArchiveStatus,
        HandlerConflict,
        InboxBacklog,
        Runway,
        Status,
        SubscriberStatus,
        WorkerStatus,
    )

ERROR_CHARACTERS = 60
"""Characters of an error in the table of destinations; `--json` has more of it."""


def status(
    db: DatabaseOptions,
    exact: Annotated[
        bool, typer.Option("--exact", help="Count inbox and leases even if that reads millions of rows.")
    ] = False,
    every: Annotated[bool, typer.Option("--all", help="Also each worker and relay that is gone.")] = False,
    queue_url: Annotated[
        str | None,
        typer.Option(
            "--queue", help="Also ask this queue, of SQS or scheme:rest, for its backlog.", callback=checked_queue
        ),
    ] = None,
    lease_table: Annotated[
        str | None, typer.Option("--lease-table", help="Also read this DynamoDB table of leases.")
    ] = None,
    watched: Annotated[
        bool, typer.Option("--watch", help="Show it again and again until Ctrl-C; with --json a line each time.")
    ] = False,
    interval: Annotated[float, typer.Option(metavar="SECONDS", help="Between two times of --watch.", min=0.1)] = 2.0,
    as_json: JsonOption = False,
) -> None:
    """Show what is processed, what waits, what is parked, and who blocks.

    Of the inbox: for each subscriber, what is processed, what waits for another attempt, what is parked.

    Each worker at work, what it does, and what is paused.

    Of leases, where there are any: for each subscriber, what is completed, in flight, left behind by an owner that
    died, and failed. Of those in DynamoDB, with --lease-table.

    Of the outbox, where it has been used: for each destination, what waits to be sent, and the relays at work. No more
    than 100,000 messages are looked at; beyond, figures are lower bounds and estimates, and say so.

    Of bulk loads: which of them wait for a lock, and who holds it.

    And what has kept Postgres from cleaning up its tables for more than a minute.
    """
    from txbox.status import read_status

    with db.engine() as engine:

        def read() -> Callable[[], None]:
            found = read_status(engine, schema=db.schema, prefix=db.prefix, exact=exact)
            others = _read_others(engine, db, queue_url, lease_table, exact=exact)
            if as_json:
                return lambda: _print_as_json(found, others, one_line=watched)
            return lambda: _print(found, others, every=every)

        if watched:
            watch(read, interval, headed=not as_json)
        else:
            read()()


@dataclass(frozen=True, slots=True)
class _Others:
    """What is not in the database: a queue's backlog, and leases in DynamoDB. None where it was not asked for."""

    queue: Mapping[str, int] | None
    lease_table: "LeaseStatus | None"


def _read_others(
    engine: "Engine", db: DatabaseTarget, queue_url: str | None, lease_table: str | None, *, exact: bool
) -> _Others:
    backlog = in_dynamodb = None
    if queue_url:
        from txbox_workers.brokers import DatabasePlace, broker_of

        with closing(broker_of(queue_url).queue(queue_url, DatabasePlace(engine, db.schema, db.prefix))) as queue:
            backlog = queue.backlog()
    if lease_table is not None:
        from txbox_aws.dynamodb.table import EXACT_UP_TO_ITEMS, read_lease_table

        in_dynamodb = read_lease_table(lease_table, exact_up_to_rows=math.inf if exact else EXACT_UP_TO_ITEMS)
    return _Others(backlog, in_dynamodb)


def _print_as_json(found: "Status", others: _Others, *, one_line: bool) -> None:
    values = found.as_dict()
    _mask_errors(values["outbox"])
    values |= {name: value for name, value in asdict(others).items() if value is not None}
    print_json(values, one_line=one_line)


def _print(found: "Status", others: _Others, *, every: bool) -> None:
    if found.subscribers:
        headings = ("subscriber", "processed", "last", "retrying", "dead letters")
        print_table(headings, [_subscriber(line) for line in found.subscribers])
    rows = f"{found.inbox_rows:,}" if found.exact else f"about {found.inbox_rows:,}"
    typer.echo(f"inbox: {rows} rows" + ("" if found.exact else "; --exact counts them per subscriber"))
    for line in found.subscribers:
        if line.held_keys:
            typer.echo(printable(_held(line)))
    if found.runway is not None:
        _print_runway(found.runway)
    _print_workers(found.workers, every=every)
    for paused in found.pauses:
        typer.echo(printable(_paused(paused, found)))
    _print_leases(found.leases)
    if others.lease_table is not None:
        _print_leases(others.lease_table, heading="ledger in DynamoDB")
    _print_outbox(found.outbox, every=every)
    for backlog in found.backlogs:
        typer.echo(printable(_backlog(backlog)))
    for conflict in found.conflicts:
        typer.echo(printable(_conflict(conflict)))
    for load in found.blocked_loads:
        if not load.usual:
            typer.echo(printable(f"blocked: {load}"))
    if others.queue is not None:
        typer.echo("queue: " + ", ".join(f"{count:,} {what}" for what, count in others.queue.items()))


def _backlog(backlog: "InboxBacklog") -> str:
    to = backlog.destination
    if not backlog.workers:
        start = f"start a PostgresWorker of {backlog.subscriber_id}, or `txbox worker --queue {to}`"
        return f"{to}: no worker is at work; {start}"
    takes = "" if backlog.drain_seconds is None else f", done in {span(backlog.drain_seconds)}"
    messages = f"{'' if backlog.exact else 'about '}{counted(backlog.messages, 'message')}"
    return f"{to}: {counted(backlog.workers, 'worker')}, {_rate(backlog.per_second)} per second; {messages}{takes}"


def _conflict(conflict: "HandlerConflict") -> str:
    from txbox.postgres.sqlstates import CONFLICTS

    had = counted(conflict.conflicts, CONFLICTS.get(conflict.sqlstate, conflict.sqlstate))
    relation = f" on {conflict.relation}" if conflict.relation else ""
    return (
        f"conflicts: {conflict.subscriber_id} had {had}{relation} "
        f"since {conflict.first_at:%Y-%m-%d %H:%M:%S}, the last at {conflict.last_at:%Y-%m-%d %H:%M:%S}"
    )


def _held(line: "SubscriberStatus") -> str:
    since = "" if line.oldest_held_at is None else f" since {line.oldest_held_at:%Y-%m-%d %H:%M:%S}"
    return f"order: dead letters hold {counted(line.held_keys, 'key')} of {line.subscriber_id}{since}"


def _subscriber(line: "SubscriberStatus") -> tuple[str, ...]:
    dead = ", ".join(f"{count} {reason}" for reason, count in line.dead_letters.items())
    return (
        line.subscriber_id,
        "?" if line.processed is None else f"{line.processed:,}",
        "?" if line.last_processed_at is None else f"{line.last_processed_at:%Y-%m-%d %H:%M:%S}",
        f"{line.retrying:,}",
        dead or "0",
    )


def _print_workers(workers: "Sequence[WorkerStatus]", *, every: bool) -> None:
    alive = [worker for worker in workers if not worker.stale]
    if shown := workers if every else alive:
        headings = (
            "worker",
            "subscriber",
            "state",
            "per second",
            "outcomes",
            "retries",
            "last batch",
            "version",
            "seen",
        )
        print_table(headings, [_worker(line) for line in shown])
    if not every and len(alive) < len(workers):
        typer.echo(_gone("worker", [worker for worker in workers if worker.stale]))


def _worker(line: "WorkerStatus") -> tuple[str, ...]:
    deadlocks = f" ({counted(line.deadlocks, 'deadlock')})" if line.deadlocks else ""
    return (
        f"{line.host} {line.pid}",
        line.subscriber_id,
        line.state,
        _rate(sum(line.per_second.values()) if line.per_second else None),
        ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(line.outcomes.items())) or "none",
        f"{line.retries:,}{deadlocks}",
        "" if line.last_batch_at is None else f"{line.last_batch_at:%Y-%m-%d %H:%M:%S}",
        line.version,
        _seen(line),
    )


def _paused(pause: "Pause", found: "Status") -> str:
    since = "" if pause.paused_at is None else f" since {pause.paused_at:%Y-%m-%d %H:%M:%S}"
    note = f" ({' '.join(pause.note.split())})" if pause.note else ""
    text = f"paused: {pause.kind} {pause.name}, by {pause.paused_by}{since}{note}"
    who: Sequence[WorkerStatus | RelayStatus] = found.outbox.relays
    if pause.kind == "subscriber":
        who = [worker for worker in found.workers if worker.subscriber_id == pause.name]
    alive = [one.state for one in who if not one.stale]
    if not alive:
        return text
    agent = "worker" if pause.kind == "subscriber" else "relay"
    return f"{text}; {alive.count('drained')} of {counted(len(alive), agent)} drained"


def _print_runway(runway: "Runway") -> None:
    if runway.horizons:
        lines = [(one.subscriber_id, _moment(one.horizon), _moment(one.oldest_at)) for one in runway.horizons]
        print_table(("forgets", "horizon", "oldest id kept, about"), lines)
    if runway.generations:
        headings = ("generation", "opened", "rows, about", "size")
        print_table(
            headings,
            [
                (str(one.generation), _moment(one.opened_at), f"{one.rows:,}", _size(one.bytes))
                for one in runway.generations
            ],
        )
    parts = [f"the inbox has {_size(runway.inbox_bytes)}"]
    if runway.rotation_due_seconds is not None:
        due = runway.rotation_due_seconds
        late = f"the next generation is due since {span(-due)}"
        parts.append(late if due < 0 else f"the next generation is due in {span(due)}")
    if runway.seconds_ago is None:
        parts.append("no round was ever finished; run `txbox maintain`")
    elif runway.overdue:
        parts.append(f"it has not run for {span(runway.seconds_ago)}; run `txbox maintain`, unless it is scheduled")
    else:
        parts.append(f"it ran {span(runway.seconds_ago)} ago, by {runway.maintainer}")
    typer.echo(printable(f"maintenance: {'; '.join(parts)}"))
    if runway.waits_for:
        pids = ", ".join(map(str, runway.waits_for))
        typer.echo(
            "maintenance: nothing more is forgotten until the transactions have ended that began before the horizons "
            f"moved: server processes {pids}; wait, or end one by SELECT pg_terminate_backend({runway.waits_for[0]})"
        )
    for archive in runway.archives:
        typer.echo(printable(f"archive: {archive.location} has {_reach(archive)}; nothing is forgotten beyond"))
    for task in runway.tasks:
        if task.error is not None:
            typer.echo(printable(mask(f"maintenance: {task.task} is not done: {task.error}")))


def _reach(archive: "ArchiveStatus") -> str:
    if archive.archived_upto is None or archive.behind_seconds is None:
        return "nothing yet; run `txbox archive`"
    late = "; run `txbox archive`" if archive.behind_seconds > _ARCHIVE_LATE_SECONDS else ""
    return f"what is older than {archive.archived_upto:%Y-%m-%d}, {span(archive.behind_seconds)} ago{late}"


def _moment(at: datetime | None) -> str:
    return "?" if at is None else f"{at:%Y-%m-%d %H:%M:%S}"


def _size(count: int) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < _STEP:
            return f"{count:,.0f} {unit}"
        count //= _STEP
    return f"{count:,.0f} TB"


def _print_leases(leases: "LeaseStatus", *, heading: str = "ledger") -> None:
    if leases.ledgers:
        headings = (heading, "completed", "in flight", "run out", "failed", "longest")
        print_table(headings, [_ledger(line) for line in leases.ledgers])
    if not leases.exact:
        of = " in DynamoDB" if heading != "ledger" else ""
        typer.echo(f"leases{of}: about {leases.rows:,} rows; --exact counts them per subscriber")


def _ledger(line: "LedgerStatus") -> tuple[str, ...]:
    counts = (f"{count:,}" for count in (line.completed, line.in_flight, line.run_out, line.failed))
    return (line.subscriber_id, *counts, "" if line.longest_seconds is None else span(line.longest_seconds))


def _print_outbox(outbox: "OutboxStatus", *, every: bool) -> None:
    if outbox.destinations:
        of_destinations = ("destination", "waiting", "delayed", "retrying", "oldest", "dead letters", "error")
        print_table(of_destinations, [_destination(line) for line in outbox.destinations])
    alive = [relay for relay in outbox.relays if not relay.stale]
    for line in outbox.destinations:
        if line.unreachable is not None:
            typer.echo(printable(mask(_unreachable(line, len(alive)))))
    if shown := outbox.relays if every else alive:
        of_relays = ("relay", "state", "sent", "refused", "per second", "version", "seen")
        print_table(of_relays, [_relay(line) for line in shown])
    if not every and len(alive) < len(outbox.relays):
        typer.echo(_gone("relay", [relay for relay in outbox.relays if relay.stale]))
    if outbox.messages != 0 or outbox.destinations or outbox.relays or outbox.kept_messages != 0:
        typer.echo(_summary(outbox))
    for holder in outbox.snapshot_holders:
        typer.echo(printable(mask(_blocks(holder))))
    if not outbox.sees_all_sessions and any(holder.kind == "session" for holder in outbox.snapshot_holders):
        typer.echo("what other users run is not shown to this one: GRANT pg_read_all_stats to it, or use another")


def _destination(line: "DestinationStatus") -> tuple[str, ...]:
    at_least = "" if line.exact else "≥ "
    counts = (f"{at_least}{count:,}" if count else "0" for count in (line.waiting, line.delayed, line.retrying))
    error = mask((line.error or "").partition("\n")[0])
    return (
        line.destination,
        *counts,
        "" if line.oldest_seconds is None else span(line.oldest_seconds),
        f"{line.dead_letters:,}",
        f"{error[:ERROR_CHARACTERS]} (refused {counted(line.most_attempts, 'time')})" if error else "",
    )


def _unreachable(line: "DestinationStatus", relays: int) -> str:
    some = f" ({line.unreachable_relays} of {relays} relays)" if line.unreachable_relays < relays else ""
    return f"unreachable: {line.destination}: {line.unreachable}{some}"


def _gone(kind: str, gone: "Sequence[RelayStatus | WorkerStatus]") -> str:
    """Return a line about workers or relays that are gone: how many, and when the last one was seen."""
    last = min(gone, key=lambda one: one.seen_seconds_ago)
    ago = f"{span(last.seen_seconds_ago)} ago"
    if len(gone) == 1:
        return printable(f"gone: the {kind} {last.host} {last.pid}, seen {ago}")
    return f"gone: {len(gone)} {kind}s, the last of them seen {ago}; --all shows them"


def _seen(line: "RelayStatus | WorkerStatus") -> str:
    return f"{span(line.seen_seconds_ago)} ago" + (": is it gone?" if line.stale else "")


def _mask_errors(outbox: dict[str, Any]) -> None:
    """Mask passwords in the errors of brokers and relays. The names of destinations stay as they are."""
    for line in outbox["destinations"]:
        line |= {name: line[name] and mask(line[name]) for name in ("error", "unreachable")}
    for relay in outbox["relays"]:
        relay["outages"] = {destination: mask(error) for destination, error in relay["outages"].items()}


def _relay(line: "RelayStatus") -> tuple[str, ...]:
    counts = (f"{line.sent:,}", f"{line.failed:,}", _rate(line.sent_per_second))
    return (f"{line.host} {line.pid}", line.state or "", *counts, line.version or "", _seen(line))


def _rate(per_second: float | None) -> str:
    return "–" if per_second is None else f"{per_second:,.1f}"  # noqa: RUF001 - a dash: not known yet


def _summary(outbox: "OutboxStatus") -> str:
    from txbox.outbox.status import is_relayed

    if outbox.messages is None:
        parts = ["an unknown number of messages"]
    else:
        parts = [f"{'' if outbox.exact else 'about '}{counted(outbox.messages, 'message')}"]
    if not outbox.in_time:
        parts.append("not every destination was looked at: that took too long")
    alive = [relay for relay in outbox.relays if not relay.stale]
    has_rate = any(relay.sent_per_second is not None for relay in alive)
    rate = _rate(outbox.sent_per_second if has_rate else None)
    if not outbox.relays_in_time:
        parts.append("which relays are at work could not be read in time")
    elif alive or not outbox.destinations or any(is_relayed(one.destination) for one in outbox.destinations):
        parts.append(f"{counted(len(alive), 'relay')}, {rate} sent per second" if alive else "no relay is at work")
    if outbox.removed_rows >= _MANY_ROWS and (outbox.snapshot_holders or not outbox.in_time):
        parts.append(f"about {outbox.removed_rows:,} rows that were sent are not cleaned up")
    if outbox.kept_messages is None:
        parts.append("sent messages are kept, it is not known how many")
    elif outbox.kept_messages:
        parts.append(f"{'' if outbox.kept_exact else 'about '}{counted(outbox.kept_messages, 'sent message')} kept")
    return f"outbox: {'; '.join(parts)}"


def _blocks(holder: "SnapshotHolder") -> str:
    who = holder.kind if holder.pid is None else f"{holder.kind} {holder.pid}"
    details = [holder.name and repr(holder.name), holder.owner and f"of {holder.owner}", holder.state]
    text = ", ".join(detail for detail in details if detail)
    since = "" if holder.seconds is None else f" for {span(holder.seconds)}"
    remedy = _REMEDIES[holder.kind].format(pid=holder.pid)
    return (
        f"blocks: {who}{f' ({text})' if text else ''} has kept Postgres from cleaning up{since}, behind "
        f"{holder.transactions:,} transactions" + (f": {holder.query}" if holder.query else "") + f"; {remedy}"
    )


_MANY_ROWS = 10_000
_STEP = 1_024
_ARCHIVE_LATE_SECONDS = 3 * 86_400.0

_REMEDIES = {
    "session": "to end it: SELECT pg_terminate_backend({pid})",
    "standby": "end the long query on the standby, or switch its hot_standby_feedback off",
    "prepared transaction": "to end it: COMMIT PREPARED or ROLLBACK PREPARED with that name",
    "replication slot": "start what reads it, or drop it with pg_drop_replication_slot",
}
