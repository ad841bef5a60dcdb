"""Real PgBouncers in transaction mode: the one of this machine's packages, and one that prepares statements."""

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from sqlalchemy import make_url

from support.waiting import wait_until


@contextmanager
def pgbouncer(url: str, *, size: int = 4, max_prepared_statements: int | None = None) -> Iterator[str]:
    """Put PgBouncer before a server; yield the URL that leads through it.

    Args:
        url: the server and its database.
        size: how many server connections there are.
        max_prepared_statements: that setting, of a version that knows it; None: this machine's version, as it comes.
    """
    program = _program(prepares=max_prepared_statements is not None)
    place = make_url(url)
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    settings = {
        "listen_addr": "127.0.0.1",
        "listen_port": port,
        "unix_socket_dir": "",
        "auth_type": "any",
        "pool_mode": "transaction",
        "default_pool_size": size,
        "max_client_conn": 200,
        # The one that was free for longest: two transactions of a client meet two servers.
        "server_round_robin": 1,
    }
    if max_prepared_statements is not None:
        settings["max_prepared_statements"] = max_prepared_statements
    password = "" if place.password is None else f" password='{place.password}'"
    target = f"host={place.host or '127.0.0.1'} port={place.port or 5432} user={place.username}{password}"
    text = "\n".join(
        ["[databases]", f"* = {target}", "[pgbouncer]", *(f"{name} = {value}" for name, value in settings.items()), ""]
    )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # it does not run as root
        path = Path(folder, "pgbouncer.ini")
        path.write_text(text)
        path.chmod(0o644)
        user = ["-u", "nobody"] if os.geteuid() == 0 else []
        with subprocess.Popen(
            [program, *user, str(path)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            try:
                wait_until(lambda: _answers(port), "PgBouncer")
                yield place.set(host="127.0.0.1", port=port, query={"sslmode": "disable"}).render_as_string(
                    hide_password=False
                )
            finally:
                process.kill()


def _program(*, prepares: bool) -> str:
    if prepares:
        program = os.environ.get("TXBOX_TEST_PGBOUNCER")
        if not program:
            pytest.skip("no PgBouncer of 1.21 or newer is here, nor could tests/containers/run.sh get one")
    else:
        program = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    assert program, "there is no such PgBouncer here: run `make test-containers`, which gets it"
    return program


def _answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
