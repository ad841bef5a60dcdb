"""Relays that are killed: at every moment of a batch's life, two and four at a time, while messages are published."""

import random
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from support.processes import killed_at_the_end
from support.txbox import relay_process
from support.txbox.publishers import first_arrivals
from support.waiting import wait_until
from txbox import Outbox, Outgoing
from txbox.outbox.status import read_outbox_status, relays_at_work

pytestmark = pytest.mark.chaos

KILLED = -signal.SIGKILL
OWN = "own:file"
OUTBOX = Outbox()

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def broker(tmp_path: Path) -> Path:
    return tmp_path / "broker"


@pytest.fixture
def start(schema_url: str, broker: Path) -> Iterator[Start]:
    """Start relay processes, and see that none outlives the test."""
    with killed_at_the_end() as processes:

        def start(**settings: Any) -> "subprocess.Popen[bytes]":
            processes.append(relay_process.start(schema_url, broker, **settings))
            return processes[-1]

        yield start


def publish(engine: Engine, first: int, count: int, *, keys: int = 7) -> None:
    """Publish numbers, each under its id; some in one transaction, some in one each; some keyless."""
    numbers = range(first, first + count)
    messages = [
        Outgoing(OWN, str(number), key=f"k{number % keys}" if number % 3 else None, message_id=f"m-{number}")
        for number in numbers
    ]
    with engine.begin() as connection:
        OUTBOX.publish_many(connection, messages)


def left(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.exec_driver_sql("SELECT count(*) FROM outbox_message").scalar_one())


def check(broker: Path, count: int, *, keys: int = 7) -> Counter[str]:
    """See that every message has arrived, first arrivals in order; return how often each has."""
    received = relay_process.arrived(broker)
    order = first_arrivals(received)
    keyless = order.pop(None)
    assert sorted(map(int, keyless)) == [number for number in range(count) if not number % 3]
    expected = {
        f"k{key}": [number for number in range(count) if number % 3 and number % keys == key] for key in range(keys)
    }
    assert {key: list(map(int, numbers)) for key, numbers in order.items()} == expected
    return Counter(message.id for message in received)


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("moment", relay_process.MOMENTS)
def test_a_relay_that_is_killed_loses_nothing_and_sends_again_only_what_was_in_its_hands(
    engine: Engine, broker: Path, start: Start, moment: str, kind: str
) -> None:
    publish(engine, 0, 200)
    killed = start(kill=moment, kill_in=3, senders=1, batch_size=20, kind=kind, concurrency=1)
    assert killed.wait(60) == KILLED
    waiting, arrived = left(engine), len(relay_process.arrived(broker))
    if moment == "after settle":
        assert waiting + arrived == 200
    elif moment == "before send":
        assert waiting + arrived >= 200
    else:
        assert waiting + arrived > 200, "what arrived is not settled yet"
    assert 0 < arrived < 200
    publish(engine, 200, 100)
    successor = start(kind=kind)
    wait_until(lambda: left(engine) == 0, "an empty outbox", timeout=60)
    successor.terminate()
    assert successor.wait(30) == 0
    times = check(broker, 300)
    again = sum(times.values()) - 300
    assert set(times.values()) <= {1, 2}
    assert again <= 20, "no more than the one batch that was in its hands"
    if moment == "after settle":
        assert again == 0
    elif moment != "before send":
        assert again > 0


def test_a_relay_that_is_killed_is_gone_at_once_whenever_it_has_reported(
    engine: Engine, broker: Path, start: Start
) -> None:
    killed, other = start(), start()
    wait_until(lambda: relays_at_work(engine) == 2, "both relays at work", timeout=60)
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE outbox_relay SET seen_at = now() + interval '1 h'")
    killed.kill()
    assert killed.wait(20) == KILLED
    wait_until(lambda: relays_at_work(engine) == 1, "the other one alone")
    assert {line.pid: line.stale for line in read_outbox_status(engine).relays} == {killed.pid: True, other.pid: False}
    other.terminate()
    assert other.wait(30) == 0


@pytest.mark.parametrize(("relays", "kind"), [(2, "sync"), (4, "sync"), (4, "async")])
def test_relays_are_killed_over_and_over_while_messages_come(
    engine: Engine, broker: Path, start: Start, relays: int, kind: str
) -> None:
    chance = random.Random(relays)
    count = 750
    working = [start(pause=0.002, batch_size=20, senders=2, kind=kind) for _ in range(relays)]
    wait_until(lambda: alive(engine) == relays, "all relays at work", timeout=60)
    kills = 0
    for first in range(0, count, 50):
        publish(engine, first, 50)
        if first % 250 == 200:
            victim = chance.randrange(relays)
            working[victim].kill()
            assert working[victim].wait(20) == KILLED
            kills += 1
            working[victim] = start(pause=0.002, batch_size=20, senders=2, kind=kind)
            wait_until(lambda done=first: len(relay_process.arrived(broker)) > done, "some progress", timeout=60)
    assert kills == 3
    wait_until(lambda: left(engine) == 0, "an empty outbox", timeout=60)
    for process in working:
        process.terminate()
    # One that was started a moment ago may not have got as far as to handle the signal.
    assert {process.wait(30) for process in working} <= {0, -signal.SIGTERM}
    check(broker, count)


def alive(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.exec_driver_sql("SELECT count(*) FROM outbox_relay").scalar_one())


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_relay_that_is_stopped_and_goes_on_hours_later_does_no_harm(
    engine: Engine, broker: Path, start: Start, kind: str
) -> None:
    """SIGSTOP stands for a machine that is suspended: the server takes its claim away, another relay sends on."""
    publish(engine, 0, 300)
    stopped = start(pause=0.3, batch_size=30, senders=1, publish_timeout_seconds=1, kind=kind)
    wait_until(lambda: relay_process.arrived(broker), "its first messages", timeout=60)
    stopped.send_signal(signal.SIGSTOP)
    other = start()
    wait_until(lambda: left(engine) == 0, "all the others' work", timeout=60)
    stopped.send_signal(signal.SIGCONT)
    publish(engine, 300, 30)
    wait_until(lambda: left(engine) == 0, "an empty outbox", timeout=60)
    for process in (stopped, other):
        process.terminate()
    assert {process.wait(30) for process in (stopped, other)} == {0}
    check(broker, 330)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_million_messages_go_through_in_constant_memory(engine: Engine) -> None:
    """In this process, while they are published: what a relay keeps in mind does not grow with what it has sent."""
    import resource

    from txbox.relay import Relay

    count, piece = 1_000_000, 10_000
    publisher = relay_process.Counting(count)
    relay = Relay(engine, {"own": publisher})
    relay.start()
    peaks: list[int] = []
    for first in range(0, count, piece):
        with engine.begin() as connection:
            OUTBOX.publish_many(
                connection,
                [
                    Outgoing(OWN, f"{number:012}".ljust(200), key=f"k{number % 5_000}" if number % 2 else None)
                    for number in range(first, first + piece)
                ],
            )
        wait_until(lambda sent=first: publisher.count >= sent - 5 * piece, "the relay to keep up", timeout=120)
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    wait_until(lambda: left(engine) == 0, "an empty outbox", timeout=300)
    assert relay.stop()
    assert publisher.count == count, "each exactly once: nothing was killed"
    assert sum(publisher.seen) == count
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peaks[9]) / 1024
    assert grown < 30, f"{grown:.0f} MiB more at its end than after the first 100,000 messages"
