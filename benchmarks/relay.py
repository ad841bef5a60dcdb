"""The relay's benchmark: what publishing costs, how fast a relay is, how soon a message arrives.

Each figure is held against a limit that is measured beside it: the business update alone, a plain delete over psycopg,
boto3 alone. The ratios mean something; the absolute figures are those of one machine on one day.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from business import Business, WrongResult
from pgbench import PgbenchFailed, find_pgbench
from relay_measurements import Bench, Sizes
from relay_place import OutboxPlace
from relay_plan import CONNECTIONS, plan
from report import Target, print_figures, print_targets, write_json
from rich.console import Console
from running import add_options, chosen, embedded, kept, measured

DESCRIPTION = """\
Measure the outbox and its relay:

  publish   a business transaction with and without our INSERT, by pgbench (the server's cost) and by Python; and with a
            NOTIFY in it, to show why we have none
  drain     a backlog through relays that send nowhere, against plain deletes and against what 16 producers write
  sqs       a backlog into the local SQS, against boto3 alone with as many threads
  latency   from the return of a commit to the arrival at the publisher, at 1,000 messages a second and out of idleness
  bell      what the bell, and a relay at work, take from producers at full speed
  idle      queries and processor time of a relay that has nothing to do
  health    windows of messages published and relayed at once, while an old snapshot is held and without one
  memory    a million messages through one relay

After each measurement the accounts must add up and the outbox must be empty; otherwise nothing is reported.
"""

EPILOG = """\
examples:
  make bench-relay                                  everything, about half an hour
  make bench-relay BENCH=--quick                    a first look, about three minutes
  python benchmarks/relay.py --only "publish|drain"
  python benchmarks/relay.py --only "health" --messages 5000000
  python benchmarks/relay.py --list                 the keys of all measurements

The database is a PostgreSQL of its own on this machine, started for the run and removed after it, with fsync on. With
--url the tables live in the schema txbox_benchmark there, which is dropped and made anew.
"""

QUICK = {
    "seconds": 1.0,
    "rounds": 1,
    "backlog": 50_000,
    "messages": 300_000,
    "snapshot_messages": 300_000,
    "memory_messages": 100_000,
    "window": 20_000,
    "queue_messages": 1_000,
    "idle_seconds": 5.0,
    "wakes": 3,
}


def targets() -> list[Target]:
    """What the outbox and the relay aim at; each is judged by the medians of the rounds."""
    return [
        Target(
            "publish: transactions with our INSERT over without (pgbench), 16c",
            "publish pgbench, 16c",
            "publish pgbench business only, 16c",
            0.85,
            at_least=True,
        ),
        Target(
            "publish: the same beside an order's row, 16c",
            "publish pgbench order, 16c",
            "publish pgbench order only, 16c",
            0.85,
            at_least=True,
        ),
        Target(
            "capacity of one relay over what 16 producers write (Python)",
            "drain relay x1",
            "publish Python, 16c",
            10,
            at_least=True,
        ),
        Target(
            "capacity of two relays over what 16 producers write (Python)",
            "drain relay x2",
            "publish Python, 16c",
            10,
            at_least=True,
        ),
        Target("latency: commit to receipt at 1,000/s, p99", "latency at 1,000/s, p99", None, 10, at_least=False),
        Target(
            "producers at 1,000/s with a relay: what they reach of it",
            "latency at 1,000/s, producers",
            "latency at 1,000/s, producers without relay or bell",
            0.9,
            at_least=True,
        ),
        Target(
            "producers at full speed with the bell over without it",
            "bell on, a listener",
            "bell off, no relay",
            0.9,
            at_least=True,
        ),
        Target("idle: transactions", "idle transactions", None, 2, at_least=False),
        Target("health: first windows over last, old snapshot", "health snapshot, slowdown", None, 1.2, at_least=False),
        Target("health: first windows over last", "health, slowdown", None, 1.2, at_least=False),
        Target("memory: peak over the first percent", "memory peak", "memory at first", 1.2, at_least=False),
    ]


def tables() -> list[tuple[str, list[tuple[str, str | None]]]]:
    """Titles, and under each the keys to show with what they are held against."""
    publish: list[tuple[str, str | None]] = []
    for count in CONNECTIONS:
        limit = f"publish pgbench business only, {count}c"
        publish += [(limit, None)]
        publish += [(f"publish pgbench{way}, {count}c", limit) for way in ("", " into a plain table", " with NOTIFY")]
    publish += [
        ("publish pgbench order only, 16c", None),
        ("publish pgbench order, 16c", "publish pgbench order only, 16c"),
    ]
    python = "publish Python business only, 16c"
    publish += [(python, None), ("publish Python without bell, 16c", python), ("publish Python, 16c", python)]
    drain: list[tuple[str, str | None]] = []
    for count in (1, 2, 4):
        limit = f"drain by plain deletes x{count}"
        drain += [(limit, None), (f"drain relay x{count}", limit)]
    drain += [("drain relay keyed x1", "drain by plain deletes x1")]
    drain += [("publish Python, 16c", "drain relay x1"), ("publish pgbench, 16c", "drain relay x1")]
    latency: list[tuple[str, str | None]] = []
    for name in ("median", "p99", "most"):
        limit = f"latency at 1,000/s by plain deletes, {name}"
        latency += [(limit, None), (f"latency at 1,000/s, {name}", limit)]
    latency += [(f"latency out of idleness, {name}", None) for name in ("median", "most")]
    paced = "latency at 1,000/s, producers without relay or bell"
    latency += [(paced, None), ("latency at 1,000/s, producers", paced)]
    alone = "bell off, no relay"
    bell: list[tuple[str, str | None]] = [
        (alone, None),
        ("bell on, a listener", alone),
        ("bell on, a relay at work", alone),
    ]
    health: list[tuple[str, str | None]] = []
    for name in ("health snapshot", "health"):
        first = f"{name}, first windows"
        health += [(first, None), (f"{name}, last windows", first), (f"{name}, slowdown", None)]
        health += [(f"{name}, table", None), (f"{name}, indexes", None)]
    return [
        ("publish: business transactions a second, with and without a publish", publish),
        ("drain: messages a second, nothing sent", drain),
        ("sqs: messages a second into the local SQS", [("sqs boto3 alone", None), ("sqs relay", "sqs boto3 alone")]),
        ("latency: from commit to receipt", latency),
        ("bell: business transactions a second that publish, 16 producers", bell),
        ("idle: a second of a relay with nothing to do", [("idle transactions", None), ("idle processor", None)]),
        ("health: messages a second published and relayed at once", health),
        ("memory", [(f"memory {name}", None) for name in ("at first", "peak", "at the end")]),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, report, and return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.quick:
        parser.set_defaults(**QUICK)
        options = parser.parse_args(arguments)
    console, errors = Console(), Console(stderr=True)
    sizes = Sizes(**{name: getattr(options, name) for name in Sizes.__dataclass_fields__})
    with ExitStack() as stack:
        try:
            program = "" if options.list else find_pgbench(options.pgbench)
            url = "" if options.list else options.url or embedded(stack, max_wal_size="4GB")
            business = Business(url)
            bench = Bench(url, program, business, OutboxPlace(url, business), sizes, stack)
            wanted = chosen(plan(bench), options.only)
            if not wanted:
                errors.print(f"no measurement has a key like {options.only!r}; see --list", markup=False)
                return 2
            if options.list:
                for one in wanted:
                    print(one.key)
                return 0
            stack.enter_context(business)
            bench.place.create()
            figures = measured(console, wanted, options.rounds)
            server = {"version": business.server_version(), "embedded": options.url is None, **business.settings()}
        except (PgbenchFailed, WrongResult) as error:
            errors.print(str(error), markup=False)
            return 1
    for title, rows in tables():
        print_figures(console, title, figures, rows)
    print_targets(console, figures, targets())
    write_json(options.json, figures, targets(), kept(options), server)
    console.print(f"every figure is in {options.json}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="relay.py", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = Sizes()
    helps = {
        "seconds": "of each measurement of producers",
        "backlog": "messages of a backlog that is drained",
        "queue_messages": "messages sent to the local SQS",
        "idle_seconds": "of the look at an idle relay",
        "wakes": "messages that find the relay idle",
        "messages": "messages published and relayed at once",
        "snapshot_messages": "the same while an old snapshot is held",
        "window": "messages of a window of those",
        "feed_batch": "messages of a transaction of those",
        "memory_messages": "messages through one relay whose memory is watched",
    }
    for name, text in helps.items():
        default = getattr(sizes, name)
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=type(default), default=default, help=f"{text} (default: {default:,})")
    parser.add_argument("--quick", action="store_true", help="small sizes, for a first look")
    add_options(parser, "relay", rounds=1)
    return parser


if __name__ == "__main__":
    sys.exit(main())
