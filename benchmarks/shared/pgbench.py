"""Running pgbench: what the server can do when the client costs next to nothing."""

import math
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from sqlalchemy.engine import URL, make_url

TRIES = 20
"""How often a transaction is run that the server has rolled back for a deadlock, as a worker would."""


class PgbenchFailed(Exception):
    """pgbench did not come to an end."""


class PgbenchRun(NamedTuple):
    """What pgbench reports: how many transactions have committed, and how many a second, without connecting."""

    transactions: int
    tps: float


def run_pgbench(
    program: str, url: str, script: str, connections: int, seconds: float, variables: Mapping[str, str | int]
) -> PgbenchRun:
    """Run a script for some time, with server-side prepared statements.

    Args:
        program: pgbench.
        url: the database, as SQLAlchemy writes it.
        script: in pgbench's language.
        connections: clients; threads are as many as there are processors.
        seconds: for how long, rounded up to whole seconds.
        variables: given to the script.

    Raises:
        PgbenchFailed: it did not end well.
    """
    parsed = make_url(url)
    # The password goes by the environment, where other users of the machine do not see it.
    public = URL.create(
        "postgresql", parsed.username, None, parsed.host, parsed.port, parsed.database, parsed.normalized_query
    )
    environment = os.environ | ({"PGPASSWORD": str(parsed.password)} if parsed.password else {})
    with tempfile.TemporaryDirectory(prefix="txbox-pgbench-") as directory:
        path = Path(directory, "script.sql")
        path.write_text(script)
        command = [program, "--no-vacuum", "--protocol=prepared", f"--file={path}", f"--max-tries={TRIES}"]
        command += [f"--client={connections}", f"--jobs={min(connections, os.cpu_count() or 1)}"]
        command += [f"--time={math.ceil(seconds)}", *(f"--define={name}={value}" for name, value in variables.items())]
        command += [public.render_as_string()]
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if result.returncode:
        raise PgbenchFailed(f"pgbench ended with exit status {result.returncode}:\n{result.stderr.strip()[-2000:]}")
    transactions = re.search(r"^number of transactions actually processed: (\d+)", result.stdout, re.MULTILINE)
    tps = re.search(r"^tps = ([\d.]+)", result.stdout, re.MULTILINE)
    if transactions is None or tps is None:
        raise PgbenchFailed(f"pgbench's report reads differently than expected:\n{result.stdout}")
    return PgbenchRun(int(transactions[1]), float(tps[1]))
