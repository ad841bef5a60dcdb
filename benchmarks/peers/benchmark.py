"""The peers' benchmark: other systems beside txbox, each a program of its own, in an environment of their own."""

from functools import partial

from benchmarks.peers.peer import ACCOUNTS, CONNECTIONS, Peer
from benchmarks.shared.measurements import Row, Table
from benchmarks.shared.program import Benchmark, Option, Run

ONCE = [
    Peer("txbox SqlEffect, sets of 100", "txbox_worker", "effect", 50_000),
    Peer("txbox batch handler, sets of 100", "txbox_worker", "batch", 40_000),
    Peer("txbox PostgresWorker, SqlEffect", "txbox_worker", "postgres effect", 20_000),
    Peer("pg-boss, transactional, sets of 100", "pg_boss.mjs", "", 12_000),
    Peer("psycopg by hand, tens, sorted", "hand", "tens", 12_000),
    Peer("txbox batch handler with a cursor, tens", "txbox_worker", "cursor tens", 12_000),
    Peer("txbox cursor handler, batches of ten", "txbox_worker", "cursors", 9_000),
    Peer("txbox handler, batches of ten", "txbox_worker", "each", 5_000),
    Peer("psycopg by hand, a transaction each", "hand", "single", 4_000),
    Peer("graphile-worker with a record", "graphile_worker.mjs", "record", 3_000),
    Peer("pgqueuer with a record", "pgqueuer_worker", "record", 2_500),
    Peer("txbox AsyncWorker", "txbox_worker", "async", 3_000),
    Peer("SQLAlchemy Session by hand", "hand", "session", 2_000),
    Peer("River, JobCompleteTx", "river", "tx", 2_000),
    Peer("txbox cursor handler, a transaction each", "txbox_worker", "cursor", 2_500),
    Peer("txbox handler, a transaction each", "txbox_worker", "message", 1_700),
    Peer("txbox PostgresWorker, handler", "txbox_worker", "postgres message", 1_700),
    Peer("procrastinate with a record", "procrastinate_worker", "", 500),
    Peer("DBOS", "dbos_worker", "", 600),  # about 150, but its first second is slow
]
TWICE = [
    Peer("River, 2,000 workers", "river", "", 7_000, once=False),
    Peer("graphile-worker", "graphile_worker.mjs", "", 4_000, once=False),
    Peer("pgqueuer", "pgqueuer_worker", "", 3_500, once=False),
]
HOT_ACCOUNTS = 1_000
HOT = [
    Peer("txbox handler with locks=, hot rows", "txbox_worker", "each locks", 4_000, accounts=HOT_ACCOUNTS),
    Peer("txbox handler, hot rows", "txbox_worker", "each", 4_000, accounts=HOT_ACCOUNTS),
    Peer("SQLAlchemy Session by hand, hot rows", "hand", "session", 2_000, accounts=HOT_ACCOUNTS),
]
RELAYS = [
    Peer("txbox Relay", "relay", "txbox", 60_000, once=None),
    Peer("DELETE by hand, sets of 1,000", "relay", "hand", 60_000, once=None),
    Peer("faststream-outbox", "faststream_relay", "", 6_000, once=None),
]
LEASES = [
    Peer("txbox idempotent, DynamoDBLedger", "lease", "txbox", 400, once=None),
    Peer("Powertools idempotent_function", "lease", "powertools", 400, once=None),
]

DESCRIPTION = f"""\
Beside txbox: systems that promise the same or less, with {CONNECTIONS} connections, {ACCOUNTS:,}
accounts and one UPDATE for each message. Every tenth delivery repeats a message. Each
measurement has a database of its own; the queues are filled before the clock starts;
balances are checked after it, to the last message. "cpu us" and "server us" are the
processor time of client and server for one delivery. Versions and settings are printed.

What cannot be installed or does not run here is left out. `make bench-peers` makes the
environment.
"""


def tables(run: Run) -> list[Table]:
    """A table for each promise."""
    found = [
        ("applied, exactly once", ONCE, None),
        ("applied, duplicates twice", TWICE, None),
        (f"applied, exactly once, over {HOT_ACCOUNTS:,} accounts", HOT, HOT[-1].key),
        ("relayed from an outbox", RELAYS, RELAYS[1].key),
        ("leases, from a store without latency", LEASES, LEASES[1].key),
    ]
    return [
        Table(title, [Row(peer.key, partial(peer.measured, run), to, ours=peer.ours) for peer in peers])
        for title, peers, to in found
    ]


BENCHMARK = Benchmark(
    name="peers",
    title="txbox beside others, a second",
    description=DESCRIPTION,
    options={
        "rounds": Option("how often each is measured", 3, 5),
        "seconds": Option("about what each measurement takes", 2.0, 5.0),
    },
    tables=tables,
)
