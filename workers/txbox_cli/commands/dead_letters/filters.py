"""The filter of dead letters on the command line: its options, the same for each command, and how they are read."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from sqlalchemy import Engine

from txbox import InvalidConfiguration, Reason
from txbox.dead_letters import LetterFilter, LetterOperations
from txbox_cli.errors import UsageError
from txbox_cli.options import DatabaseTarget, ReadBy, read_moment, require_order
from txbox_cli.output import counted


def read_filter(
    subscriber: Annotated[str | None, typer.Option(help="Only this subscriber's.")] = None,
    destination: Annotated[str | None, typer.Option(help="Only those that a relay could not send there.")] = None,
    reason: Annotated[list[Reason] | None, typer.Option(help="Only those parked for this; may be repeated.")] = None,
    error: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Only those with this in their error, in any case.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Parked then or later: 2026-03-01T08:00Z, or how long ago: 2h, 7d."),
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Parked before then; as --since.")] = None,
    source: Annotated[str | None, typer.Option(metavar="URL", help="Only those from this queue.")] = None,
    message_id: Annotated[list[str] | None, typer.Option(help="Only those of this message; may be repeated.")] = None,
    header: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Only those with it; may be repeated.")
    ] = None,
    json_path: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Only those in whose body it finds something but false and null: '$.customer == 7'.",
        ),
    ] = None,
) -> LetterFilter:
    """Return the filter that the options describe.

    Raises:
        UsageError: an option cannot be read.
    """
    begin = None if since is None else read_moment("--since", since)
    end = None if until is None else read_moment("--until", until)
    require_order(begin, end)
    pairs = [each.partition("=") for each in header or ()]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise UsageError(f"--header must be NAME=VALUE, not {name!r}")
    try:
        return LetterFilter(
            subscriber_id=subscriber,
            destination=destination,
            reasons=tuple(reason or ()),
            error=error,
            since=begin,
            until=end,
            source=source,
            message_ids=tuple(message_id or ()),
            headers={name: value for name, _, value in pairs},
            json_path=json_path,
        )
    except InvalidConfiguration as refused:
        raise UsageError(
            "letters have a subscriber or, from a relay, a destination: give one of the options"
        ) from refused


FilterOptions = Annotated[LetterFilter, ReadBy(read_filter)]


def tell_passed_over(engine: Engine, db: DatabaseTarget, which: LetterFilter, *, redriven: bool = False) -> None:
    """Print how many letters the JSON path cannot be applied to, as they are left out otherwise without a word."""
    count = LetterOperations(engine, schema=db.schema, prefix=db.prefix).passed_over(which, redriven=redriven)
    if count:
        letters = counted(count, "letter")
        typer.echo(f"txbox: --json-path passes over {letters}, whose bodies Postgres cannot read as JSON", err=True)


@contextmanager
def refused_as_usage() -> Iterator[None]:
    """Turn errors in a filter that only the database finds, such as an invalid JSON path, into usage errors."""
    try:
        yield
    except InvalidConfiguration as error:
        raise UsageError(str(error)) from error
