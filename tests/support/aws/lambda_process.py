"""A sandbox of Lambda: a function in a process of its own, which tests may kill and freeze; or in theirs.

The process is given events as lines of JSON, one at a time, and answers with a line each. Run it with its settings as
JSON in the one argument. As in ``worker_process``, every run of the handler leaves a row in ``run``, committed at once.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from support.aws.lambda_events import Context
from support.processes import start_python
from support.workers.business import ADD, apply
from support.workers.worker_process import COUNT, NOTE
from txbox import DeadLetters, Inbox, Message
from txbox.leases import PostgresLedger
from txbox_aws.lambda_ import sqs_handler

Function = Callable[..., Any]
"""Takes an event and a context."""


class Sandbox:
    """A function that is ready for an event, in a process of its own."""

    def __init__(self, url: str, **settings: Any) -> None:
        """Start it.

        Args:
            url: the database, whose search path holds the tables.
            settings: ``ledger`` has it use a ledger instead of an inbox; ``deadly_once`` ids kill it in their first
                run; ``frozen_once`` ids stop it in theirs; ``pause`` is how long the handler takes, in seconds; the
                rest goes to ``sqs_handler``.
        """
        arguments = ("-m", "support.aws.lambda_process", json.dumps({"url": url, **settings}))
        self.process = start_python(*arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def send(self, event: dict[str, Any], seconds: float | None = None) -> None:
        """Invoke the function, and do not wait for it."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it was killed
            self.process.stdin.write(f"{json.dumps({'event': event, 'seconds': seconds})}\n")
            self.process.stdin.flush()

    def answer(self) -> dict[str, Any] | None:
        """Wait for the answer; None if the function has raised, or was killed."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        said = json.loads(line) if line.endswith("\n") else {}
        return said.get("answer")

    def invoke(self, event: dict[str, Any], seconds: float | None = None) -> dict[str, Any] | None:
        """Invoke the function, and return its answer; None as for ``answer``."""
        self.send(event, seconds)
        return self.answer()

    def close(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.wait(20)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()


@contextmanager
def function_in(
    url: str,
    *,
    ledger: bool = False,
    deadly_once: tuple[str, ...] = (),
    frozen_once: tuple[str, ...] = (),
    pause: float = 0.0,
    **settings: Any,
) -> Iterator[Function]:
    """Make the function in this process; the settings are those of ``Sandbox``."""
    notes = create_engine(url, isolation_level="AUTOCOMMIT", pool_size=1)
    engine = create_engine(url, pool_size=1)

    def note(message: Message) -> None:
        with notes.connect() as connection:
            connection.execute(NOTE, {"id": message.id, "pid": os.getpid()})
            first_run = connection.execute(COUNT, {"id": message.id}).scalar_one() == 1
        if message.id in frozen_once and first_run:
            os.kill(os.getpid(), signal.SIGSTOP)
        if message.id in deadly_once and first_run:
            os.kill(os.getpid(), signal.SIGKILL)

    def handle(session: Session, message: Message) -> None:
        apply(session, message)
        session.execute(ADD, {"account": 1, "amount": 1})
        note(message)
        time.sleep(pause)  # not a wait: work that takes a while, so that a kill can land in it

    def mail(message: Message) -> None:
        note(message)
        time.sleep(pause)

    if ledger:
        yield sqs_handler(
            ledger=PostgresLedger("billing", engine=engine), dead_letters=DeadLetters(engine), handler=mail, **settings
        )
    else:
        yield sqs_handler(inbox=Inbox("billing", wait_seconds=0.2), engine=engine, handler=handle, **settings)
    notes.dispose()
    engine.dispose()


def main() -> None:
    """Answer events until there are no more."""
    with function_in(**json.loads(sys.argv[1])) as function:
        for line in sys.stdin:
            asked = json.loads(line)
            context = None if asked["seconds"] is None else Context(asked["seconds"])
            try:
                said = {"answer": function(asked["event"], context)}
            except Exception as error:  # noqa: BLE001 - Lambda would report any
                said = {"error": f"{type(error).__name__}: {error}"}
            sys.stdout.write(f"{json.dumps(said)}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
