"""An outbox and an inbox, filled by plain SQL: with what is usual, with each state, and with each fault."""

import random
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Engine

from txbox.operations.audit import AuditReport

HERE, ELSEWHERE = "own:billing", "own:other"
HOUR = timedelta(hours=1)

ODD = (
    "order-é-",
    "Order-",
    "order",
    " ",
    "\U0001f389 ",
    "\uffee",
    "naïve-Ω",
    "it's %s %% \"",
    "back\\slash\n",
    "{}:",
    "~",
)
"""Of ids: what languages sort in another order than bytes, or a statement could take for its own."""


def uuid7(at: datetime, chance: random.Random) -> str:
    text = f"{int(at.timestamp() * 1000):012x}7{chance.randrange(16**3):03x}8{chance.randrange(16**15):015x}"
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


@dataclass
class World:
    """An outbox and an inbox, filled by plain SQL, and what an audit has to find in them."""

    outbox: Engine
    inbox: Engine
    chance: random.Random
    time_ordered: bool
    now: datetime
    counts: Counter[str] = field(default_factory=Counter)
    faults: set[tuple[str, str]] = field(default_factory=set)
    sent: list[tuple[Any, ...]] = field(default_factory=list)
    recorded: list[tuple[Any, ...]] = field(default_factory=list)
    letters: list[tuple[Any, ...]] = field(default_factory=list)
    failures: list[tuple[Any, ...]] = field(default_factory=list)
    position: int = 0

    def new_id(self, at: datetime) -> str:
        return (
            uuid7(at, self.chance) if self.time_ordered else f"{self.chance.choice(ODD)}{self.chance.getrandbits(80)}"
        )

    def some_time(self) -> datetime:
        """A time that is judged: after the first message that is kept, and before those in flight."""
        return self.now - HOUR - self.chance.random() * 100 * HOUR

    def send(self, message_id: str, at: datetime, destination: str = HERE) -> None:
        self.position += 1
        self.sent.append((message_id, self.position, destination, at, at))

    def record(self, message_id: str, at: datetime, letter: int | None = None, subscriber: str = "billing") -> None:
        self.recorded.append((subscriber, message_id, at, letter))

    def park(self, message_id: str, reason: str = "failed", **ended: datetime) -> int:
        number = len(self.letters) + 1
        ends = (ended.get("redriven_at"), ended.get("discarded_at"), ended.get("lease_attempts"))
        self.letters.append((number, "billing", message_id, reason, self.now - HOUR / 2, *ends))
        return number

    def fail(self, message_id: str, at: datetime) -> None:
        self.failures.append(("billing", message_id, at))

    def fault(self, kind: str, message_id: str) -> None:
        self.faults.add((kind, message_id))

    def counted(self) -> Counter[str]:
        """What an audit has to count."""
        return self.counts + Counter(kind for kind, _ in self.faults if kind != "sent_again")

    def write(self) -> None:
        for engine, statement, rows in (
            (self.outbox, _SENT, self.sent),
            (self.inbox, _RECORDED, self.recorded),
            (self.inbox, _LETTER, self.letters),
            (self.inbox, _FAILURE, self.failures),
        ):
            with engine.begin() as connection:
                if rows:
                    connection.exec_driver_sql(statement, self.chance.sample(rows, len(rows)))


_SENT = (
    "INSERT INTO outbox_sent (message_id, position, destination, headers, body, published_at, sent_at) "
    "VALUES (%s, %s, %s, '{}', '', %s, %s)"
)
_RECORDED = (
    "INSERT INTO processed_message (subscriber_id, message_id, processed_at, dead_letter_id) VALUES (%s, %s, %s, %s)"
)
_LETTER = (
    "INSERT INTO dead_letter (dead_letter_id, subscriber_id, message_id, reason, parked_at, redriven_at, discarded_at, "
    "lease_attempts, error, attempts, source, body, body_hash, headers, envelope) OVERRIDING SYSTEM VALUE "
    "VALUES (%s, %s, %s, %s, %s, %s, %s, %s, '', 5, 'own:billing', '', gen_random_uuid()::text::bytea, '{}', '{}')"
)
_FAILURE = (
    "INSERT INTO message_failure (subscriber_id, message_id, attempts, error, last_failed_at) "
    "VALUES (%s, %s, 1, '', %s)"
)


def named(report: AuditReport) -> set[tuple[str, str]]:
    return {(finding.kind.value, finding.message_id) for finding in report.findings}


def make_world(
    outbox: Engine,
    inbox: Engine,
    seed: int | str,
    messages: int = 0,
    *,
    time_ordered: bool = True,
    states: int = 0,
    faults: int = 0,
) -> World:
    """Return a world that is filled, and not written yet: so many usual messages; each state, and each fault, so often.

    Without messages it is empty.
    """
    world = World(outbox, inbox, random.Random(seed), time_ordered, datetime.now(UTC))
    if messages:
        fill(world, messages)
    plant_states(world, states)
    plant_faults(world, faults)
    return world


def fill(world: World, messages: int) -> None:
    """Plant the usual, and everything that is not usual and no fault."""
    world.send(world.new_id(world.now - 200 * HOUR), world.now - 200 * HOUR)  # the first one that is kept
    world.record(world.sent[0][0], world.now - 200 * HOUR)
    for _ in range(messages):
        at = world.some_time()
        message_id = world.new_id(at)
        world.send(message_id, at)
        # Processed before the relay has settled it, or after.
        world.record(message_id, at + world.chance.uniform(-1, 60) * timedelta(seconds=1))
    world.counts.update(sent=messages + 1, processed=messages + 1)
    # A row of another subscriber, and messages to another destination, are nobody's business here.
    world.record(world.new_id(world.some_time()), world.some_time(), subscriber="shipping")
    world.send(world.new_id(world.some_time()), world.some_time(), ELSEWHERE)


def plant_states(world: World, each: int) -> None:
    """Plant messages of every state that is no fault."""
    for _ in range(each):
        for state, how in (("parked", "failed"), ("parked", "behind"), ("expired", "expired"), ("discarded", "failed")):
            at = world.some_time()
            message_id = world.new_id(at)
            world.send(message_id, at)
            ended = {"discarded_at": world.now} if state == "discarded" else {}
            world.record(message_id, at, world.park(message_id, how, **ended))
            world.counts.update(sent=1, **{state: 1})
        message_id = world.new_id(at)
        world.send(message_id, at)
        world.fail(message_id, world.now)
        world.counts.update(sent=1, retrying=1)
        at = world.now - timedelta(minutes=1)
        message_id = world.new_id(at)
        world.send(message_id, at)
        world.counts.update(sent=1, in_flight=1)
        message_id = world.new_id(at)
        world.record(message_id, at)  # its settlement is not seen yet
        world.counts.update(recent=1)
        at = world.now - 300 * HOUR
        world.record(world.new_id(at), at)
        world.counts.update(not_kept=1)
        at = world.some_time()
        message_id = world.new_id(at)  # sent again by a replay
        world.send(message_id, at)
        world.send(message_id, at + HOUR / 2)
        world.record(message_id, at)
        world.counts.update(sent=1, processed=1, sent_again=1)
        world.fault("sent_again", message_id)


def plant_faults(world: World, each: int) -> None:
    for _ in range(each):
        at = world.some_time()
        message_id = world.new_id(at)
        world.send(message_id, at)
        world.counts.update(sent=1)
        world.fault("missing", message_id)
        message_id = world.new_id(at)
        world.send(message_id, at)
        world.fail(message_id, world.now - HOUR)
        world.counts.update(sent=1)
        world.fault("overdue", message_id)
        message_id = world.new_id(at)
        world.record(message_id, at)
        world.fault("foreign", message_id)
        message_id = world.new_id(at)
        world.send(message_id, at)
        world.record(message_id, at, 10_000)  # no such letter
        world.counts.update(sent=1)
        world.fault("unparked", message_id)
        message_id = world.new_id(at)
        world.send(message_id, at)
        world.record(message_id, at, world.park(message_id, redriven_at=world.now - HOUR))
        world.counts.update(sent=1)
        world.fault("unparked", message_id)
        message_id = world.new_id(at)
        world.send(message_id, at)
        world.park(message_id)
        world.counts.update(sent=1, parked=1)  # it is not lost: there is a letter
        world.fault("unrecorded", message_id)
        message_id = world.new_id(at)
        world.send(message_id, at)
        world.record(message_id, at)
        world.park(message_id)
        world.counts.update(sent=1, processed=1)
        world.fault("processed_since", message_id)
        message_id = world.new_id(at)
        world.send(message_id, at)
        world.record(message_id, at)
        world.park(message_id, "mismatch")
        world.counts.update(sent=1, processed=1)
        message_id = world.new_id(at)
        world.send(message_id, at)
        world.record(message_id, at, world.park(message_id))
        world.park(message_id)  # by a number that the inbox does not have
        world.counts.update(sent=1, parked=1)
        world.fault("unrecorded", message_id)
        message_id = world.new_id(at)
        world.send(message_id, at)
        world.record(message_id, at)
        world.park(message_id, "mismatch")  # another body under its id; nothing is wrong with that
        world.counts.update(sent=1, processed=1)
        message_id = world.new_id(at)
        world.send(message_id, at)
        world.counts.update(sent=1)
        world.park(message_id, "mismatch")  # that is of another body; its own is lost
        world.fault("missing", message_id)
