"""Faults: what may happen to a delivery.

Each happens with a real worker, a real Postgres and a broker that delivers at least once::

    received ─ leased ─ begun ─ statement … closed … ─ handled ─ COMMIT ─ completed ─ committed ─ acked
       │         │        │         │          │           │    ↑      ↑      │           │         │
       └─────────┴────────┴─────────┴──────────┴───────────┴────┼──────┼──────┴───────────┴─────────┴─ crash_at(place)
                                                        lose_commit   lose_commit_answer    ↑
                                                                                         lose_ack

A relay has two places, claimed ─ sent, and so has a bulk load, merging ─ merged.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from txbox import InvalidConfiguration
from txbox_testing.stages.life import Gate
from txbox_testing.stages.stage import Stage, through_proxy
from txbox_testing.stages.worker_stage import WorkerStage

PLACES = {
    "received": "the message is received, and nothing is done yet",
    "leased": "its lease is acquired; only with a ledger",
    "begun": "the handler is about to run; with an inbox, its message is recorded",
    "statement": "the handler has run a statement, with whatever engine of SQLAlchemy",
    "closed": "the handler has given a connection back to its pool; it may have committed on it",
    "handled": "the handler has returned; its transaction is not committed, or its lease not completed",
    "completed": "its lease is completed; only with a ledger",
    "committed": "everything is committed, and not acked yet",
    "acked": "the broker has forgotten the delivery",
    "claimed": "a relay has claimed messages, and sends nothing yet",
    "sent": "a relay's publisher has returned; the outbox still has what it has sent",
    "merging": "a bulk load is about to commit a chunk",
    "merged": "a bulk load has committed all chunks, and is about to say that it is finished",
}
"""The places at which a process may be killed: a worker's in their order, a relay's, and a bulk load's."""

OTHERS = {"claimed": "relay", "sent": "relay", "merging": "load", "merged": "load"}
"""What passes the places that a worker does not pass."""

FAULT_ATTEMPTS = 5
"""A worker that dies has used up an attempt, and so has a handler whose transaction is lost."""

TIMEOUT_SECONDS = 10.0
"""How long deliveries or published messages may take to be settled."""

COMMIT_OF_HANDLER = b"CLOSE txbox_guard"
"""What a worker sends with the COMMIT of a handler's transaction, and with no other. See ``guards/commit_guard.py``."""

BLOCKED_SECONDS = 0.3
"""How long a second worker has to run into what the first one holds."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that happens to a delivery, which is settled all the same.

    Attributes:
        name: the call that makes it, such as ``crash_at("handled")``.
        title: what happens, in words.
        run: makes it happen on a stage, and has everything settled. Returns False if it could not happen.
        of: what it happens to: a "worker", a "relay", or a "load".
    """

    name: str
    title: str
    run: Callable[[Any], bool]
    of: str = "worker"


def crash_at(place: str, passes: int = 1) -> Fault:
    """Kill the worker, the relay or the bulk load when it passes a place.

    Args:
        place: one of ``PLACES``.
        passes: 1 for the first time that it passes there, 2 for the second: ``crash_at("statement", 2)``.

    Raises:
        InvalidConfiguration: there is no such place.
    """
    if place not in PLACES:
        raise InvalidConfiguration(f"there is no place {place!r}; there are: {', '.join(PLACES)}")

    def run(stage: Stage) -> bool:
        gate = Gate(place, passes)
        life = stage.start(gate)
        if not stage.reaches(gate):
            return False
        stage.kill(life)
        stage.settle()
        return True

    of = OTHERS.get(place, "worker")
    counted = f", {passes}" if passes > 1 else ""
    title = f"killed when {PLACES[place].partition(';')[0]}{f', number {passes}' if passes > 1 else ''}"
    name = f'crash_at("{place}"{counted})'
    return Fault(name, title, run if of != "load" else lambda stage: bool(stage.crash(place, passes)), of)


def lose_commit() -> Fault:
    """Lose the connection to Postgres before COMMIT arrives: nothing is committed.

    Like ``lose_commit_answer``, this cannot happen if Postgres is reached by a Unix socket or with TLS.
    """
    return Fault("lose_commit()", "the connection is lost before COMMIT arrives", lambda stage: _lose(stage, False))


def lose_commit_answer() -> Fault:
    """Lose the answer to COMMIT: everything is committed, and the worker cannot know."""
    title = "Postgres has committed, and its answer is lost"
    return Fault("lose_commit_answer()", title, lambda stage: _lose(stage, True))


def _lose(stage: WorkerStage, reaches_server: bool) -> bool:
    if stage.database.address is None:
        stage.settle()
        return False
    with through_proxy(stage.engine, stage.database.address) as proxy:
        gate = Gate("begun")
        life = stage.start(gate)
        if stage.reaches(gate):
            proxy.lose_next(COMMIT_OF_HANDLER, reaches_server=reaches_server)
            gate.release()
            stage.wait_until(lambda: bool(proxy.lost) or stage.is_done())
            stage.await_settlement(life, stage.timeout)
        stage.stop(life)
        lost = bool(proxy.lost)
    stage.settle()
    return lost


def lose_ack() -> Fault:
    """Lose the ack of a delivery whose transaction has committed: the broker delivers it again."""

    def run(stage: WorkerStage) -> bool:
        stage.loses_ack = True
        stage.settle()
        return True

    return Fault("lose_ack()", "the ack is lost, and the broker delivers again", run)


def duplicate(*, at_once: bool = False) -> Fault:
    """Deliver every message twice.

    Args:
        at_once: deliver it to two workers at the same moment. False: the second time after the first is done.
    """

    def after(stage: WorkerStage) -> bool:
        stage.settle()
        stage.send_again()
        stage.settle()
        return True

    def together(stage: WorkerStage) -> bool:
        gates = Gate("received"), Gate("received")
        lives = []
        for gate in gates:
            lives.append(stage.start(gate))
            if not stage.reaches(gate):
                return False
            if gate is gates[0]:
                stage.send_again()
        for gate in gates:
            gate.release()
        stage.await_done()
        for life in lives:
            stage.stop(life)
        return True

    if at_once:
        return Fault("duplicate(at_once=True)", "delivered twice, to two workers at the same moment", together)
    return Fault("duplicate()", "delivered twice, one after the other", after)


def delay() -> Fault:
    """Let the visibility end while the handler runs: another worker is given the message as well."""

    def run(stage: WorkerStage) -> bool:
        gate = Gate("handled")
        slow = stage.start(gate)
        if not stage.reaches(gate):
            return False
        stage.redeliver()
        other = stage.start()
        stage.await_settlement(other, BLOCKED_SECONDS)
        gate.release()
        stage.await_done()
        for life in (slow, other):
            stage.stop(life)
        return True

    return Fault("delay()", "delivered to another worker, while the handler of the first is still at work", run)


def overtake() -> Fault:
    """Stop the worker before its handler until another one has taken the message over and is done; then let it go on.

    By then Postgres has ended its transaction, and its lease has run out.
    """

    def run(stage: WorkerStage) -> bool:
        gate = Gate("begun")
        stopped = stage.start(gate)
        if not stage.reaches(gate):
            return False
        stopped.stopped = True
        stage.cut()
        stage.redeliver()
        stage.settle()
        gate.release()
        stopped.stopped = False
        stage.await_settlement(stopped, stage.timeout)
        stage.stop(stopped)
        return True

    return Fault("overtake()", "stopped before its handler, overtaken by another worker, and then goes on", run)
