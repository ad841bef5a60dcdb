"""A report that is shown again and again, until Ctrl-C or SIGTERM."""

import sys
import time
from collections.abc import Callable
from datetime import datetime

import typer

from txbox import TxboxError
from txbox_cli.errors import explain, mask
from txbox_cli.output import plain_console, printable
from txbox_cli.signals import terminated_as_interrupt


def watch(read: Callable[[], Callable[[], None]], seconds: float, *, headed: bool) -> None:
    """Show a report until this process is asked to end, which is its usual end.

    In a terminal each report takes the place of the one before. If the first one cannot be read, that is raised; of a
    later one it is said, and the next one is tried. ``read`` reads a report, and returns what prints it. ``headed``:
    each begins with a line that says when it was read.
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
