"""A peer: a program of its own that works off a feed, watched from outside."""

import json
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from sqlalchemy.engine import make_url

from benchmarks.shared.database import Database, conninfo
from benchmarks.shared.measurements import Sample
from benchmarks.shared.program import Run

FOLDER = Path(__file__).parent
ENVIRONMENT = FOLDER.parents[1] / ".venv-peers"
ACCOUNTS = 100_000
CONNECTIONS = 16
DATABASE = "txbox_peers"
PATIENCE_SECONDS = 120.0

FEED = """
CREATE TABLE {schema}.feed AS
SELECT number, md5(message::text) AS message_id, (1 + message * 7919::bigint % {accounts})::int AS account
FROM generate_series(0, {count} - 1) AS number,
LATERAL (SELECT CASE WHEN {repeats} AND number % 10 = 9 THEN number / 2 - (number / 2 % 10 = 9)::int ELSE number END
) AS named (message)"""
"""Every tenth delivery repeats a message from the middle of those before it. Ids are random, accounts spread evenly."""


class Peer(NamedTuple):
    """A system with its settings.

    Attributes:
        key: its name in tables.
        program: a module of this folder, a script for Node.js, or a program in the environment.
        variant: of the program.
        per_second: about what it reaches here: decides how many messages a measurement has.
        once: whether the effect is exactly once; None: there is no effect.
        accounts: how many rows the effects are spread over.
    """

    key: str
    program: str
    variant: str
    per_second: int
    once: bool | None = True
    accounts: int = ACCOUNTS

    @property
    def command(self) -> list[str]:
        """How it is started, from the root of the repository."""
        if self.program.endswith(".mjs"):
            return ["node", str(FOLDER / self.program)]
        if (ENVIRONMENT / self.program).exists():
            return [str(ENVIRONMENT / self.program)]
        return [str(ENVIRONMENT / "bin" / "python"), "-m", f"benchmarks.peers.{self.program}"]

    @property
    def ours(self) -> bool:
        """Whether it is txbox."""
        return self.key.startswith("txbox")

    def measured(self, run: Run) -> Mapping[str, Sample]:
        """Measure once, and check the sums; nothing, and a line that says why, if the program cannot run here."""
        count = round(self.per_second * run.options["seconds"])
        with _fresh_database(run) as database:
            repeats = self.once is not None
            database.reset(accounts=self.accounts)
            database.execute(
                FEED.format(schema="txbox_benchmark", accounts=self.accounts, count=count, repeats=repeats)
            )
            try:
                about, sample = self._watched(database)
            except _LeftOut as reason:
                print(f"left out: {self.key}: {reason}")
                return {}
            if self.once is not None:
                distinct = database.number("SELECT count(DISTINCT message_id) FROM txbox_benchmark.feed")
                database.check(distinct if self.once else count, self.key)
            if self.key not in run.notes:
                promise = {True: "once: yes", False: "once: no", None: "no effect"}[self.once]
                print(f"{self.key}: {about['version']}; {about['settings']}; {promise}")
                run.notes[self.key] = {**about, "once": self.once}
        return {self.key: sample}

    def _watched(self, database: Database) -> tuple[dict[str, str], Sample]:
        given = json.dumps(
            {
                "url": conninfo(database.url),
                "variant": self.variant,
                "connections": CONNECTIONS,
                "env": str(ENVIRONMENT),
                "versions": json.loads((FOLDER / "package.json").read_text())["dependencies"],
            }
        )
        try:
            process = subprocess.Popen(
                [*self.command, given],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=FOLDER.parents[1],
            )
        except OSError as error:
            raise _LeftOut(str(error)) from error
        try:
            about = _heard(process, "version")
            database.execute("VACUUM ANALYZE")
            database.checkpoint()
            client = psutil.Process(process.pid)
            server = psutil.Process(database.backend).parent()
            assert server is not None
            assert process.stdin is not None
            before = time.perf_counter(), _cpu_seconds(client), _server_seconds(server)
            process.stdin.write("go\n")
            process.stdin.flush()
            count = int(_heard(process, "deliveries")["deliveries"])
            after = time.perf_counter(), _cpu_seconds(client), _server_seconds(server)
        finally:
            with suppress(psutil.NoSuchProcess):
                for helper in psutil.Process(process.pid).children(recursive=True):
                    helper.kill()
            process.kill()
            process.communicate()
        seconds, client_seconds, server_seconds = (late - early for late, early in zip(after, before, strict=True))
        details = {"cpu_us": client_seconds / count * 1e6, "server_us": server_seconds / count * 1e6}
        return about, Sample(count / seconds, details)


class _LeftOut(Exception):
    """The program does not run here."""


def _heard(process: "subprocess.Popen[str]", name: str) -> dict[str, Any]:
    """Return the next line of a program that is an object with such a key."""
    assert process.stdout is not None
    assert process.stderr is not None
    timer = threading.Timer(PATIENCE_SECONDS, process.kill)
    timer.start()
    try:
        for line in process.stdout:
            if line.startswith("{") and name in (said := json.loads(line)):
                return dict(said)
    finally:
        timer.cancel()
    lines = process.stderr.read().strip().splitlines() or [f"it ended, or took more than {PATIENCE_SECONDS:.0f} s"]
    raise _LeftOut(lines[-1][:200])


@contextmanager
def _fresh_database(run: Run) -> Iterator[Database]:
    """Make a database for one measurement: peers leave schemas, functions and settings behind."""
    run.database.execute(f"DROP DATABASE IF EXISTS {DATABASE} WITH (FORCE)")
    run.database.execute(f"CREATE DATABASE {DATABASE}")
    url = make_url(run.url).set(database=DATABASE).render_as_string(hide_password=False)
    try:
        with Database(url) as database:
            yield database
    finally:
        run.database.execute(f"DROP DATABASE {DATABASE} WITH (FORCE)")


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _server_seconds(server: psutil.Process) -> float:
    """Processor time of the server: what its ended processes took, too."""
    living = 0.0
    for child in server.children():
        with suppress(psutil.NoSuchProcess):  # the server's own times have it by now
            living += _cpu_seconds(child)
    times = server.cpu_times()
    return float(times.user + times.system + times.children_user + times.children_system) + living
