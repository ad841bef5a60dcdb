"""``txbox outbox``: look up what was sent, and put it into the outbox again."""

from dataclasses import asdict, replace
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from txbox_cli.errors import CommandFailed, Interrupted, UsageError, explain
from txbox_cli.options import Commands, DatabaseOptions, JsonOption, ReadBy, read_moment, require_order
from txbox_cli.output import counted, interruptible_progress, print_json, print_table, printable

if TYPE_CHECKING:
    from txbox.outbox.sent_messages import ReplayChunk, SentFilter, SentMessage, SentMessages

app = Commands(help="Look up what was sent and is kept, and put it into the outbox again.")

LINE_ENDS = "\n\t"

NOTHING_KEPT = "nothing is kept; `txbox relay --keep-sent 7d` keeps what it sends"
NO_SUCH = "no such message is kept"


def read_filter(
    destination: Annotated[str | None, typer.Option(help="Only what was sent there.")] = None,
    key: Annotated[str | None, typer.Option(help="Only messages of this key.")] = None,
    message_id: Annotated[str | None, typer.Option(help="Only the message of this id.")] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Sent then or later: 2026-03-01T08:00Z, or how long ago: 2h, 7d."),
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Sent before then; as --since.")] = None,
) -> "SentFilter":
    """Return the filter that the options describe.

    Raises:
        UsageError: an option cannot be read.
    """
    begin = None if since is None else read_moment("--since", since)
    end = None if until is None else read_moment("--until", until)
    require_order(begin, end)
    from txbox.outbox.sent_messages import SentFilter

    return SentFilter(destination=destination, key=key, message_id=message_id, since=begin, until=end)


FilterOptions = Annotated["SentFilter", ReadBy(read_filter)]


@app.command(short_help="List what was sent and is kept, the last first.")
def sent(
    db: DatabaseOptions,
    which: FilterOptions,
    before: Annotated[
        int | None,
        typer.Option(metavar="POSITION", help="The next page: with --until, as the page before ends with them."),
    ] = None,
    limit: Annotated[int, typer.Option(help="How many, at most.", min=1, max=10_000)] = 100,
    bodies: Annotated[
        bool, typer.Option("--bodies", help="Also their headers and bodies, whatever is in them.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List what was sent and is kept, the last first.

    A relay keeps what it sends where it is told to, with `txbox relay --keep-sent 7d` or Relay(keep_sent=…).
    """
    end = None
    if before is not None:
        if not isinstance(which.until, datetime):
            raise UsageError("--before goes with --until TIME; the page before ends with both")
        end, which = (which.until, before), replace(which, until=None)
    with db.engine() as engine:
        from txbox.outbox.sent_messages import SentMessages

        kept = SentMessages(engine, schema=db.schema, prefix=db.prefix)
        messages = kept.find(which, limit=limit, bodies=bodies, before=end)
        nothing = not messages and kept.is_empty()
    if as_json:
        print_json([_as_dict(message, bodies) for message in messages])
        return
    if not messages:
        typer.echo(NOTHING_KEPT if nothing else NO_SUCH)
        return
    if bodies:
        for message in messages:
            _print_whole(message)
    else:
        _print_lines(messages)
    if len(messages) == limit:
        last = messages[-1]
        typer.echo(f"there may be more: --until {_time(last)} --before {last.position}, or a larger --limit")


def _print_lines(messages: "list[SentMessage]") -> None:
    print_table(
        ("sent", "position", "destination", "key", "message", "bytes"),
        [
            (
                _time(message),
                str(message.position),
                message.destination,
                message.key or "",
                message.message_id,
                f"{message.size:,}",
            )
            for message in messages
        ],
    )


@app.command(short_help="Send kept messages again, under the ids they had.")
def replay(
    db: DatabaseOptions,
    which: FilterOptions,
    after: Annotated[
        int, typer.Option(metavar="POSITION", help="Only messages behind this position: continues where one stopped.")
    ] = -1,
    yes: Annotated[bool, typer.Option("--yes", help="Do it. Without it, they are only counted.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Put messages that were sent into the outbox again; without --yes, only count them.

    For receivers that have lost what they had received. The copies have the ids, keys and headers of the originals, so
    a receiver with an inbox takes them for duplicates of what it has processed: nothing is applied twice. To have them
    applied again, the receiver's inbox has to forget them. A FIFO queue or topic drops by itself what it had been sent
    within five minutes.

    Of what was sent to one destination under one id, only the first is taken: not the copies that an earlier replay has
    left.

    They go in chunks of one transaction, in the order in which they were published, behind what their keys have now.
    Ctrl-C and SIGTERM end it after a chunk: exit status 130, and a line that says how to continue.
    """
    which = replace(which, after=after)
    with db.engine() as engine:
        from txbox.outbox.sent_messages import SentMessages

        kept = SentMessages(engine, schema=db.schema, prefix=db.prefix)
        chunks = kept.plan_replay(which)
        done = _replay(kept, chunks, which, quiet=as_json) if yes else 0
        nothing = not chunks and kept.is_empty()
    planned, copies = sum(chunk.messages for chunk in chunks), sum(chunk.copies for chunk in chunks)
    left_out = f"; {counted(copies, 'later copy', 'later copies')} of the same left out" if copies else ""
    if as_json:
        print_json({"found": planned, "copies_left_out": copies, "published": done})
    elif not planned:
        typer.echo(NOTHING_KEPT if nothing else NO_SUCH)
    elif yes:
        typer.echo(f"{_again(done)}{left_out}")
    else:
        puts = f"--yes puts {'it' if planned == 1 else 'them'} into the outbox again"
        typer.echo(f"{counted(planned, 'message')}{_between(chunks)}{left_out}; {puts}")


def _replay(kept: "SentMessages", chunks: "list[ReplayChunk]", which: "SentFilter", *, quiet: bool) -> int:
    done, position = 0, which.after
    with interruptible_progress(quiet=quiet) as (progress, asked):
        task = progress.add_task("messages", total=sum(chunk.messages for chunk in chunks))
        for number, chunk in enumerate(chunks, start=1):
            try:
                done += kept.replay(chunk, which)
            except Exception as error:
                if not done:
                    raise
                raise CommandFailed(f"{explain(error)}; {_so_far(done, position)}") from error
            position = chunk.last
            progress.update(task, completed=done)
            if not asked.empty() and number < len(chunks):
                raise Interrupted(f"interrupted; {_so_far(done, position)}")
    return done


def _so_far(done: int, position: int) -> str:
    return f"{_again(done)}; continue with --after {position} and the same filters"


def _again(done: int) -> str:
    return f"{counted(done, 'message')} {'is' if done == 1 else 'are'} in the outbox again"


def _between(chunks: "list[ReplayChunk]") -> str:
    if not chunks:
        return ""
    first, last = min(chunk.sent_from for chunk in chunks), max(chunk.sent_to for chunk in chunks)
    return f", sent from {first.isoformat(timespec='seconds')} to {last.isoformat(timespec='seconds')}"


def _as_dict(message: "SentMessage", bodies: bool) -> dict[str, object]:
    return {name: value for name, value in asdict(message).items() if bodies or name not in ("headers", "body")}


def _print_whole(message: "SentMessage") -> None:
    for name, value in _as_dict(message, bodies=True).items():
        if value is not None and name != "body":
            typer.echo(f"{name + ':':16}{printable(str(value))}")
    body = (message.body or b"").decode("utf-8", "backslashreplace")
    typer.echo(f"body:\n{printable(body, keep=LINE_ENDS)}\n")


def _time(message: "SentMessage") -> str:
    return message.sent_at.isoformat()
