"""A single fault: what it does to a delivery, and to a relay; and where it cannot happen."""

import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text

from support.processes import start_python
from txbox import InvalidConfiguration, Message, Outbox, Outcome
from txbox.relay import FunctionPublisher
from txbox_testing import (
    PLACES,
    Fault,
    crash_at,
    delay,
    deliver,
    duplicate,
    lose_ack,
    lose_commit,
    lose_commit_answer,
    overtake,
    relay,
)
from txbox_testing.stages.stage import NotSettled

from .conftest import ADD, BOOK, PURCHASE, apply

PROCESSED, DUPLICATE, IN_FLIGHT = Outcome.PROCESSED, Outcome.DUPLICATE, Outcome.IN_FLIGHT

Rows = Callable[[str], list[object]]


@pytest.mark.parametrize(
    ("fault", "last"),
    [
        (crash_at("begun"), PROCESSED),
        (crash_at("committed"), DUPLICATE),
        (lose_commit(), PROCESSED),
        (lose_commit_answer(), DUPLICATE),
        (lose_ack(), DUPLICATE),
        (duplicate(), DUPLICATE),
        (duplicate(at_once=True), DUPLICATE),
        (delay(), DUPLICATE),
        (overtake(), PROCESSED),
    ],
    ids=lambda value: value.name if isinstance(value, Fault) else value.value,
)
def test_after_each_fault_a_message_is_applied_once(engine: Engine, rows: Rows, fault: Fault, last: Outcome) -> None:
    before = threading.active_count()
    runs: list[str] = []

    def handler(session: Any, message: Message) -> None:
        runs.append(message.id)
        apply(session, message)

    delivered = deliver(handler, PURCHASE, engine=engine, fault=fault)
    acked = [outcome for outcome in delivered.outcomes if outcome in (PROCESSED, DUPLICATE)]
    assert acked[-1] is last
    assert acked.count(PROCESSED) <= 1
    assert rows("SELECT cents FROM account") == [2600]
    # Had it not happened, the handler would have run once. In the last one, another run meets the lost transaction.
    runs_twice = fault.name in ('crash_at("begun")', "lose_commit()", "overtake()")
    assert len(runs) == (2 if runs_twice and fault.name != 'crash_at("begun")' else 1)
    assert threading.active_count() <= before + 2, "but for those that txbox has once in each process"


def test_an_undisturbed_delivery_says_what_became_of_each_message(engine: Engine) -> None:
    delivered = deliver(apply, PURCHASE, PURCHASE, engine=engine)
    assert (delivered.outcomes, delivered.error) == ([PROCESSED, DUPLICATE], None)

    def fails(session: Any, message: Message) -> None:
        raise RuntimeError("no such account")

    failed = deliver(fails, Message("p-2", b""), engine=engine)
    assert (failed.outcome, str(failed.error)) == (Outcome.DEAD, "no such account")
    again = deliver(fails, Message("p-3", b""), engine=engine, max_attempts=3)
    assert again.outcomes == [Outcome.FAILED, Outcome.FAILED, Outcome.DEAD]


def test_what_cannot_happen_is_said(engine: Engine) -> None:
    with pytest.raises(InvalidConfiguration, match=f"no place 'commited'; there are: {', '.join(PLACES)}"):
        crash_at("commited")
    with pytest.raises(InvalidConfiguration, match=r'crash_at\("statement", 3\) cannot happen to this handler'):
        deliver(apply, PURCHASE, engine=engine, fault=crash_at("statement", 3))
    with pytest.raises(InvalidConfiguration, match="befalls a relay"):
        deliver(apply, PURCHASE, engine=engine, fault=crash_at("sent"))
    with pytest.raises(InvalidConfiguration, match="cannot befall a relay"):
        relay({"own": FunctionPublisher(print)}, engine=engine, fault=lose_ack())


def test_what_is_not_settled_in_time_is_said(engine: Engine) -> None:
    def refuses(session: Any, message: Message) -> None:
        raise RuntimeError("not today")

    with pytest.raises(NotSettled, match=r"not settled within 0.2 s: RuntimeError\('not today'\)"):
        deliver(refuses, PURCHASE, engine=engine, max_attempts=None, timeout=0.2)


@pytest.mark.parametrize("place", ["claimed", "sent"])
def test_a_relay_that_is_killed_has_its_messages_sent_again_under_the_same_id(
    engine: Engine, rows: Rows, place: str
) -> None:
    with engine.begin() as connection:
        message_id = Outbox().publish(connection, "own:there", b"booked")
    arrived: list[str] = []
    publishers = {"own": FunctionPublisher(lambda message: arrived.append(message.id))}
    relayed = relay(publishers, engine=engine, fault=crash_at(place))
    assert arrived == relayed.message_ids == [message_id] * (2 if place == "sent" else 1)
    assert rows("SELECT message_id FROM outbox_message") == []


PROGRAM = """
import os, signal, sys, traceback
from sqlalchemy import create_engine
from txbox import Inbox
from txbox.instrumentation import Committed, Received
from txbox.testing import kill_at
from txbox_workers.memory_source import MemorySource
from txbox_workers.worker import Worker
from integration.txbox_testing.conftest import ADD, BOOK, PURCHASE

def work(url, place):
    own = create_engine(url)

    def die(at):
        if place == at:
            os.kill(os.getpid(), signal.SIGKILL)

    def handler(session, message):
        die("begun")
        session.execute(ADD)
        die("statement")
        with own.begin() as connection:
            connection.execute(BOOK, {"note": "own"})
        die("closed")
        session.execute(ADD)
        die("handled")

    event = {"received": Received, "committed": Committed}.get(place)
    options = {"inbox": Inbox("test"), "engine": create_engine(url), "hooks": [kill_at(event)] if event else []}
    Worker(MemorySource([PURCHASE]), handler=handler, **options).run()

for line in sys.stdin:
    child = os.fork()  # to start a process for each takes longer
    if child == 0:
        try:
            work(*line.split())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def work_and_die() -> Iterator[Callable[[str, str], int]]:
    """Have a process work on a database that dies at a place; return its status."""
    with start_python("-c", PROGRAM, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:

        def run(url: str, place: str) -> int:
            print(url, place, file=program.stdin, flush=True)
            return int(program.stdout.readline())

        yield run


@pytest.mark.parametrize("place", ["received", "begun", "statement", "closed", "handled", "committed"])
def test_a_simulated_death_leads_to_what_sigkill_leads_to(
    engine: Engine,
    own: Engine,
    make_database: Callable[..., str],
    work_and_die: Callable[[str, str], int],
    place: str,
) -> None:
    """A trial is as good as its deaths: hence the processes, which die where the handler here is killed."""
    other = make_database(f"TEMPLATE {engine.url.database}")
    assert work_and_die(other, place) == -signal.SIGKILL

    def handler(session: Any, message: Message) -> None:
        session.execute(ADD)
        with handlers.begin() as connection:
            connection.execute(BOOK, {"note": "own"})
        session.execute(ADD)

    states = []
    for handlers, fault in ((create_engine(other), None), (own, crash_at(place))):
        worker = create_engine(handlers.url)
        outcome = deliver(handler, PURCHASE, engine=worker, fault=fault).outcome
        with handlers.connect() as connection:
            states.append([outcome, *(connection.execute(text(query)).scalars().all() for query in STATE)])
        for each in (handlers, worker):
            each.dispose()
    assert states[0] == states[1]
    doubled = place in ("closed", "handled")
    assert states[0] == [
        DUPLICATE if place == "committed" else PROCESSED,
        [5100],
        ["opened", *["own"] * (1 + doubled)],
        ["p-1"],
    ]


STATE = (
    "SELECT cents FROM account",
    "SELECT note FROM booking ORDER BY note",
    "SELECT message_id FROM processed_message",
)
