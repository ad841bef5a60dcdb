"""``txbox dead-letters import`` and ``redrive-queue``, for SQS's own dead-letter queues."""

import queue
import signal
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from txbox import DeadLetters, Failures, Identify, identify
from txbox_cli import importer
from txbox_cli.errors import CommandFailed, Interrupted, UsageError
from txbox_cli.options import DatabaseOptions, JsonOption, checked_queue_url
from txbox_cli.output import counted, interruptible_progress, print_json

if TYPE_CHECKING:
    from rich.progress import Progress

    from txbox_aws.sqs import DeadLetterQueue, ImportedLetters, MessageMove

POLL_SECONDS = 2.0
"""Between two queries of how far SQS is with a move."""

QueueArgument = Annotated[
    str,
    typer.Argument(metavar="URL", help="The dead-letter queue, https://HOST/ACCOUNT/NAME.", callback=checked_queue_url),
]


def import_letters(
    queue_url: QueueArgument,
    subscriber: Annotated[str, typer.Option("--subscriber", help="Whose messages they are.")],
    db: DatabaseOptions,
    source: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="The queue that they were sent to, where SQS does not tell it.",
            callback=checked_queue_url,
        ),
    ] = None,
    envelope: Annotated[str, typer.Option(help="How the subscriber's workers read bodies.")] = "auto",
    identify_by: Annotated[
        str | None,
        typer.Option("--identify", metavar="MODULE:NAME", help="The function by which its workers choose ids."),
    ] = None,
    count: Annotated[int | None, typer.Option(help="How many, at most.", min=1)] = None,
    as_json: JsonOption = False,
) -> int:
    """Take the messages of an SQS dead-letter queue into the dead letters here, under the ids that they had.

    Each is deleted from the queue after its letter is committed, so it may be ended at any moment and run again. What
    the subscriber has processed is not parked, only deleted there. Then `txbox dead-letters redrive` sends the letters
    to the queue that they came from.

    Read bodies and choose ids as the subscriber's workers do, or the ids are others: --envelope, --identify.
    """
    choose = identify if identify_by is None else _load_identify(identify_by)
    from txbox_aws.sqs import DeadLetterQueue

    with (
        db.engine() as engine,
        closing(DeadLetterQueue(queue_url)) as letters_there,
        interruptible_progress(quiet=as_json) as (progress, asked),
    ):
        task = progress.add_task("messages", total=count)

        def report(so_far: "ImportedLetters") -> bool:
            progress.update(task, completed=so_far.messages - so_far.in_flight)
            return not asked.empty()

        letters = DeadLetters(engine, schema=db.schema, prefix=db.prefix)
        with engine.connect() as connection:
            letters.check(connection)
        done = letters_there.import_letters(
            letters,
            Failures(engine, subscriber, schema=db.schema, prefix=db.prefix),
            source=source,
            envelope=envelope,
            identify=choose,
            count=count,
            report=report,
        )
    if as_json:
        print_json(asdict(done))
    else:
        copies = f" (and {counted(done.copies, 'copy', 'copies')} of them)" if done.copies else ""
        typer.echo(f"{done.parked} parked{copies}, {done.processed} processed before")
        if done.in_flight:
            typer.echo(f"{done.in_flight} left in the queue: they are being processed; import them in a minute")
        if done.undeleted:
            typer.echo(f"txbox: SQS did not confirm {counted(done.undeleted, 'deletion')}; run it again", err=True)
    if not asked.empty():
        raise Interrupted("interrupted; what is left is in the queue: run it again")
    return 1 if done.undeleted else 0


def redrive_queue(
    queue_url: QueueArgument,
    to: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Another queue than the messages' own.", callback=checked_queue_url),
    ] = None,
    per_second: Annotated[
        int | None, typer.Option("--per-second", metavar="N", help="Messages a second, at most.", min=1, max=500)
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do it, although messages without an id of their own get new ids.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Have SQS move the messages of its dead-letter queue back to the queues that they were sent to.

    SQS gives them new MessageIds. A message without an id of its own (see `message-id`) is a new message then, and runs
    again if it had been processed. `txbox dead-letters import` and `redrive` keep the ids.

    It waits until SQS is done; Ctrl-C and SIGTERM have SQS end the move, and what was moved stays where it is.
    """
    if not yes:
        raise UsageError(
            "SQS gives the messages new MessageIds, so those without an id of their own may run twice: `txbox "
            "dead-letters import` keeps the ids; or add --yes"
        )
    from txbox_aws.sqs import DeadLetterQueue

    with (
        closing(DeadLetterQueue(queue_url)) as letters_there,
        interruptible_progress(quiet=as_json) as (progress, asked),
    ):
        handle = letters_there.start_move(to=to, per_second=per_second)
        move = _watch(letters_there, handle, progress, asked)
    if as_json:
        print_json({name: value for name, value in asdict(move).items() if name != "task_handle"})
    elif move.status == "COMPLETED":
        typer.echo(f"{counted(move.moved, 'message')} moved")
    if not asked.empty() and move.status != "COMPLETED":
        raise Interrupted(f"interrupted; SQS had moved {counted(move.moved, 'message')}")
    if move.status != "COMPLETED":
        why = f": {move.failure}" if move.failure else ""
        raise CommandFailed(f"the move has {move.status.lower()}{why}; {counted(move.moved, 'message')} moved")


def _watch(
    letters_there: "DeadLetterQueue",
    handle: str,
    progress: "Progress",
    asked: "queue.SimpleQueue[signal.Signals | None]",
) -> "MessageMove":
    """Show how far SQS is until the move ends."""
    cancelled = False
    task = progress.add_task("messages", total=None)
    while True:
        move = letters_there.latest_move()
        if move is None:
            raise CommandFailed("SQS does not know the move that it has started; look at the queue itself")
        progress.update(task, completed=move.moved, total=move.total)
        if move.ended:
            return move
        try:
            number = asked.get(timeout=POLL_SECONDS)
        except queue.Empty:
            continue
        asked.put(number)  # for the report
        if cancelled:
            return move
        letters_there.cancel_move(handle)
        cancelled = True


def _load_identify(target: str) -> Identify:
    module, name = importer.find(target, such_as="billing:message_id")
    found = getattr(module, name, None)
    if not callable(found):
        raise UsageError(f"{target} is not a function that returns a message's id")
    chosen: Identify = found
    return chosen
