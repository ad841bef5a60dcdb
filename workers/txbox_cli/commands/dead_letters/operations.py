"""``txbox dead-letters redrive``, ``discard``, ``resume`` and ``operations``."""

import queue
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from txbox import BrokerError, DeadLetters, LetterNotFound, Reason
from txbox.dead_letters import (
    HeldKey,
    LetterFilter,
    LetterOperation,
    LetterOperations,
    LetterOutcome,
    LetterResult,
    OperationKind,
)
from txbox.outbox.status import relays_at_work
from txbox_cli.commands.dead_letters.filters import FilterOptions, refused_as_usage, tell_passed_over
from txbox_cli.commands.dead_letters.letters import TIME, print_letters, summary
from txbox_cli.errors import CommandFailed, Interrupted, UsageError, explain
from txbox_cli.options import (
    DatabaseOptions,
    DatabaseTarget,
    JsonOption,
    ReadBy,
    checked_queue,
    read_span,
    this_user,
    with_options,
)
from txbox_cli.output import counted, interruptible_progress, print_json, print_table, printable
from txbox_workers.brokers import DatabasePlace, letter_sender

SHOWN_LETTERS = 10
"""Letters that a dry run shows."""

SHOWN_KEYS = 10
"""Held keys that are listed."""

DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only count and show which letters are meant.")]
ByOption = Annotated[
    str | None, typer.Option("--by", metavar="NAME", help="Who does it, for the record; user@host by default.")
]
RateOption = Annotated[
    float | None,
    typer.Option("--per-second", metavar="N", help="Letters a second, at most; 0.1 is one in ten seconds."),
]


def read_choice(
    which: FilterOptions,
    numbers: Annotated[list[int] | None, typer.Argument(help="The letters' numbers.", show_default=False)] = None,
    every: Annotated[bool, typer.Option("--all", help="All that wait, or all of the filter.")] = False,
) -> LetterFilter:
    """Return the filter, or that of the numbers. Raise ``UsageError`` unless one of the two, or --all, is given."""
    given = bool(which.as_dict())
    if numbers and (every or given):
        raise UsageError("say which letters by their numbers, or by a filter or --all, not by both")
    if not (numbers or every or given):
        raise UsageError("say which letters: their numbers, a filter, or --all")
    return replace(which, numbers=tuple(dict.fromkeys(numbers)) if numbers else None)


ChoiceOptions = Annotated[LetterFilter, ReadBy(with_options(read_choice))]


def redrive(
    which: ChoiceOptions,
    db: DatabaseOptions,
    dry_run: DryRunOption = False,
    per_second: RateOption = None,
    queue_url: Annotated[
        str | None, typer.Option("--queue", help="Another queue than the letters' own.", callback=checked_queue)
    ] = None,
    until_free: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Go on with what is parked behind them meanwhile, until their keys are free; for 10m at most, say.",
        ),
    ] = None,
    expired: Annotated[
        bool,
        typer.Option("--expired", help="Also expired ones: it was checked that their messages were not processed."),
    ] = False,
    note: Annotated[str | None, typer.Option("--note", help="Why, for the record.")] = None,
    by: ByOption = None,
    as_json: JsonOption = False,
) -> int:
    """Send dead letters back to their queue, under the ids they had.

    Name them by their numbers, by a filter, or with --all. Which letters are meant is kept before the first one is
    sent, and so is what becomes of each: what is parked later is not sent, and `txbox dead-letters resume` goes on
    after Ctrl-C, SIGTERM or a crash. They are sent in the order of their numbers.

    Those that a relay could not send are put into the outbox again, under the ids, keys and headers they had, behind
    what their keys have now. A relay has to be running to send them.

    Where workers keep order (ordered=True), messages that were in the queue before are parked behind the letters of
    their key, and their letters wait, too. --until-free sends those as well, in order, until no key of the letters is
    held. It ends before that, and says so, after its time, or when all that is left takes a person.

    Repair what made them fail first. A letter that fails again is parked again, under a new number. One whose message
    was processed since is not sent. One that was parked as expired is not sent either, unless with --expired: whether
    its message was processed is forgotten, so check that first.
    """
    until_free_seconds = None if until_free is None else read_span("--until-free", until_free).total_seconds()
    with db.engine() as engine, refused_as_usage():
        tell_passed_over(engine, db, which)
        if dry_run:
            _show(engine, db, which, "sent through again", expired=expired, in_order=True, as_json=as_json)
            return 0
        operation = LetterOperations(engine, schema=db.schema, prefix=db.prefix).select(
            which,
            OperationKind.REDRIVE,
            by=by or this_user(),
            note=note,
            queue_url=queue_url,
            per_second=per_second,
            expired=expired,
            until_free_seconds=until_free_seconds,
        )
        return _carry_out(engine, db, operation, which, as_json=as_json)


def discard(
    which: ChoiceOptions,
    db: DatabaseOptions,
    dry_run: DryRunOption = False,
    note: Annotated[str | None, typer.Option("--note", help="Why, for the record. It has to be given.")] = None,
    by: ByOption = None,
    as_json: JsonOption = False,
) -> int:
    """Give dead letters up: their messages are never run, and copies of them go on being acked.

    Name them as for redrive. The letters stay, with who gave them up and why; `list --all` shows them. There is no way
    back: a discarded letter cannot be redriven.
    """
    if not dry_run and not (note or "").strip():
        raise UsageError("say why they are given up: --note TEXT")
    with db.engine() as engine, refused_as_usage():
        tell_passed_over(engine, db, which)
        if dry_run:
            _show(engine, db, which, "discarded", as_json=as_json)
            return 0
        operations = LetterOperations(engine, schema=db.schema, prefix=db.prefix)
        operation = operations.select(which, OperationKind.DISCARD, by=by or this_user(), note=note)
        return _carry_out(engine, db, operation, which, kind=OperationKind.DISCARD, as_json=as_json)


def resume(
    operation: Annotated[int, typer.Argument(help="Its number, from `txbox dead-letters operations`.")],
    db: DatabaseOptions,
    per_second: RateOption = None,
    by: ByOption = None,
    as_json: JsonOption = False,
) -> int:
    """Go on with a redrive or a discard: with the letters that are left, and those that have failed.

    It may run while another process carries the same operation out: they take turns, and no letter is sent twice.
    """
    with db.engine() as engine:
        found = LetterOperations(engine, schema=db.schema, prefix=db.prefix).get(operation)
        return _carry_out(engine, db, found, as_json=as_json, per_second=per_second, by=by or this_user())


def list_operations(
    db: DatabaseOptions,
    unfinished: Annotated[bool, typer.Option("--unfinished", help="Only those that can be resumed.")] = False,
    limit: Annotated[int, typer.Option(help="How many, at most.", min=1, max=10_000)] = 100,
    as_json: JsonOption = False,
) -> None:
    """List redrives and discards, the last first: who asked for what, and what became of the letters."""
    with db.engine() as engine:
        found = LetterOperations(engine, schema=db.schema, prefix=db.prefix).list(unfinished=unfinished, limit=limit)
    if as_json:
        print_json([asdict(operation) for operation in found])
        return
    if not found:
        typer.echo("no operations")
        return
    print_table(
        ("no.", "kind", "requested", "by", "letters", "finished", "filter", "note"),
        [
            (
                str(operation.operation_id),
                operation.kind,
                f"{operation.requested_at:{TIME}}",
                operation.requested_by,
                _counts(operation),
                "no" if operation.finished_at is None else f"{operation.finished_at:{TIME}}",
                _filter_text(operation),
                operation.note or "",
            )
            for operation in found
        ],
    )


def _show(
    engine: Engine,
    db: DatabaseTarget,
    which: LetterFilter,
    what: str,
    *,
    expired: bool = True,
    in_order: bool = False,
    as_json: bool,
) -> None:
    """Count and show the selected letters.

    ``expired`` includes letters that are too old to judge. ``in_order`` leaves out those behind letters not selected.
    """
    counts = LetterOperations(engine, schema=db.schema, prefix=db.prefix).counts(which, expired=expired)
    letters = DeadLetters(engine, schema=db.schema, prefix=db.prefix).list(which, limit=SHOWN_LETTERS, body_bytes=0)
    left = sum(count.letters for count in counts if count.reason is Reason.EXPIRED and not expired)
    done = [count for count in counts if expired or count.reason is not Reason.EXPIRED]
    behind = sum(count.behind for count in done) if in_order else 0
    total = sum(count.letters for count in done) - behind
    if as_json:
        rows = [asdict(count) for count in counts]
        print_json({"letters": total, "counts": rows, "first": [summary(letter) for letter in letters]})
        return
    if counts:
        print_table(
            ("subscriber", "reason", "letters", "oldest"),
            [
                (count.subscriber_id, count.reason, f"{count.letters:,}", f"{count.oldest_at:{TIME}}")
                for count in counts
            ],
        )
        print_letters(letters, states=which.numbers is not None)
    withheld = f"; {counted(left, 'expired letter')} only with --expired" if left else ""
    refused = f"; {counted(behind, 'letter')} not, behind others of the same key that are not sent" if behind else ""
    typer.echo(f"{counted(total, 'letter')} would be {what}{withheld}{refused}")


def _carry_out(
    engine: Engine,
    db: DatabaseTarget,
    operation: LetterOperation | None,
    which: LetterFilter | None = None,
    *,
    kind: OperationKind = OperationKind.REDRIVE,
    as_json: bool,
    **options: Any,
) -> int:
    """Carry out an operation and report it; return the exit status. ``kind`` is that of one that found no letters."""
    latest: dict[int, LetterResult] = {}
    held: list[HeldKey] = []
    interrupted = False
    if operation is not None:
        operations = LetterOperations(engine, schema=db.schema, prefix=db.prefix)
        place = DatabasePlace(engine, db.schema, db.prefix)
        operation, interrupted = _run(operations, operation, latest, place=place, quiet=as_json, options=options)
        if "until_free_seconds" in operation.options:
            held = operations.held_keys(operation.operation_id)
    results = list(latest.values())
    found = {outcome: [one for one in results if one.outcome is outcome] for outcome in LetterOutcome}
    failed = {one.dead_letter_id: _why(one) for one in found[LetterOutcome.FAILED]}
    if which is not None and which.numbers is not None and not interrupted:
        failed |= {one.dead_letter_id: _why(one) for one in found[LetterOutcome.GONE]}
        found[LetterOutcome.GONE] = []
        missing = set(which.numbers) - {one.dead_letter_id for one in results}
        failed |= {number: str(LetterNotFound(number)) for number in sorted(missing)}
    done = {
        outcome.value: [one.dead_letter_id for one in found[outcome]]
        for outcome in LetterOutcome
        if outcome is not LetterOutcome.FAILED
    }
    published = sum(one.to_outbox for one in found[LetterOutcome.REDRIVEN])
    if as_json:
        number = None if operation is None else operation.operation_id
        pending = operation.pending if operation else 0
        keys = [asdict(each) for each in held]
        print_json({"operation": number, **done, "failed": failed, "pending": pending, "held_keys": keys})
    else:
        is_discard = (kind if operation is None else operation.kind) is OperationKind.DISCARD
        sent = len(done["redriven"]) - published
        for line in [f"{len(done['discarded'])} discarded"] if is_discard else _redriven(sent, published):
            typer.echo(line)
        if done["processed"]:
            typer.echo(f"{len(done['processed'])} not sent: processed since")
        if done["gone"]:
            typer.echo(f"{len(done['gone'])} left out: redriven, discarded or deleted meanwhile")
        for why in failed.values():
            typer.echo(f"txbox: {printable(why)}", err=True)
        for line in _held(held):
            typer.echo(f"txbox: {printable(line)}", err=True)
        if operation is not None and found[LetterOutcome.FAILED] and not interrupted:
            typer.echo(f"`txbox dead-letters resume {operation.operation_id}` tries what has failed again")
        elif operation is not None and held and not interrupted:
            typer.echo(_go_on(operation))
    if published and relays_at_work(engine, schema=db.schema, prefix=db.prefix) == 0:
        typer.echo("txbox: no relay is at work; start one: txbox relay", err=True)
    if interrupted and operation is not None:
        raise Interrupted(f"interrupted, {counted(operation.pending, 'letter')} left; {_go_on(operation)}")
    return 1 if failed or held else 0


def _run(
    operations: LetterOperations,
    operation: LetterOperation,
    latest: dict[int, LetterResult],
    *,
    place: DatabasePlace,
    quiet: bool,
    options: dict[str, Any],
) -> tuple[LetterOperation, bool]:
    """Carry out an operation until it is done or a signal arrives. Return it, and whether a signal cut it short."""
    interrupted = False
    left = operation.pending + operation.outcomes.get(LetterOutcome.FAILED, 0)
    with (
        interruptible_progress(quiet=quiet) as (progress, asked),
        letter_sender(place, operation.options.get("queue_url")) as send,
    ):
        task = progress.add_task("letters", total=None if "until_free_seconds" in operation.options else left)

        def asked_to_end(seconds: float) -> bool:
            nonlocal interrupted
            try:
                asked.get(timeout=seconds)
            except queue.Empty:
                return False
            interrupted = True
            return True

        def report(result: LetterResult) -> None:
            latest[result.dead_letter_id] = result
            progress.advance(task)

        try:
            operation = operations.carry_out(operation.operation_id, send, report=report, pause=asked_to_end, **options)
        except SQLAlchemyError as error:
            raise CommandFailed(
                f"{explain(error)}; {counted(len(latest), 'letter')} done; {_go_on(operation)}"
            ) from error
    unfinished = operation.pending > 0 or ("until_free_seconds" in operation.options and operation.finished_at is None)
    return operation, interrupted and unfinished


def _go_on(operation: LetterOperation) -> str:
    return f"`txbox dead-letters resume {operation.operation_id}` goes on"


def _why(result: LetterResult) -> str:
    """Return why a letter was not sent, with a remedy."""
    return explain(BrokerError(result.error or result.outcome))


def _redriven(sent: int, published: int) -> Iterator[str]:
    """Yield what became of redriven letters: sent to their queues, or put into the outbox for a relay."""
    if sent or not published:
        yield f"{sent} sent through again"
    if published:
        yield f"{published} put into the outbox again; a relay sends {'it' if published == 1 else 'them'}"


def _held(keys: Sequence[HeldKey]) -> Iterator[str]:
    """Yield which keys are not free, and why."""
    for held in keys[:SHOWN_KEYS]:
        if held.stuck:
            why = "waits for a person: repair what made it fail, and redrive it, or discard it"
        elif held.waits:
            why = "was parked since, as messages of the key go on coming: resume this, or pause what sends them"
        else:
            why = "is on its way: see that a worker runs, and resume this"
        yield f"key {held.order_key!r} of {held.subscriber_id} is not free: dead letter {held.dead_letter_id} {why}"
    if len(keys) > SHOWN_KEYS:
        yield f"{counted(len(keys) - SHOWN_KEYS, 'more key')} not free; see `txbox status`"


def _counts(operation: LetterOperation) -> str:
    return ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(operation.outcomes.items()))


def _filter_text(operation: LetterOperation) -> str:
    text = ", ".join(f"{name} {value}" for name, value in operation.filter.items())
    return text[:_FILTER_CHARACTERS] or "all"


_FILTER_CHARACTERS = 100
