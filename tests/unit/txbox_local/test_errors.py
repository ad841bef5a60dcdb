"""Why a server did not start: the cause first. The logs are PostgreSQL's own, word for word."""

import errno

import pytest

from txbox_local.errors import no_space, server_failed

LOGS = {
    "a port below 1024": (
        """\
2026-11-22 11:24:17.048 UTC [16122] LOG:  starting PostgreSQL 18.6 on x86_64-pc-linux-gnu, compiled by gcc, 64-bit
2026-11-22 11:24:17.048 UTC [16122] LOG:  could not bind IPv4 address "127.0.0.1": Permission denied
2026-11-22 11:24:17.048 UTC [16122] WARNING:  could not create listen socket for "127.0.0.1"
2026-11-22 11:24:17.048 UTC [16122] FATAL:  could not create any TCP/IP sockets
2026-11-22 11:24:17.053 UTC [16122] LOG:  database system is shut down""",
        "port 80 of 127.0.0.1 is not for ordinary users (permission denied): name a port from 1024 on\n",
    ),
    "a full disk": (
        """\
selecting default time zone ... Etc/UTC
creating configuration files ... ok
running bootstrap script ... 2026-11-22 11:24:20.300 UTC [16259] FATAL:  could not write to file \
"pg_wal/xlogtemp.16259": No space left on device
child process exited with exit code 1
initdb: removing contents of data directory "data.new\"""",
        "the disk is full: free some space, or name another directory (TMPDIR, if it is a temporary one)\n",
    ),
    "anything else": (
        """\
2026-11-22 11:24:17.048 UTC [16122] LOG:  starting PostgreSQL 18.6 on x86_64-pc-linux-gnu, compiled by gcc, 64-bit
2026-11-22 11:24:17.048 UTC [16122] FATAL:  data directory "data" has wrong ownership
2026-11-22 11:24:17.048 UTC [16122] HINT:  The server must be started by the user that owns the data directory.""",
        'PostgreSQL failed: data directory "data" has wrong ownership; its log ends with:\n',
    ),
    "nothing": ("", "PostgreSQL failed: it did not say why"),
}


@pytest.mark.parametrize(("log", "begins"), LOGS.values(), ids=LOGS)
def test_the_cause_comes_first_and_then_the_log(log: str, begins: str) -> None:
    said = str(server_failed("PostgreSQL", log, port=80))
    assert said.startswith(begins)
    assert said.endswith(log)


def test_a_disk_that_is_full_is_named_as_such() -> None:
    error = no_space(OSError(errno.ENOSPC, "No space left on device", "/data/password"))
    assert str(error).startswith("the disk is full: /data/password: free some space, or name another directory")
    error = no_space(FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp', '/var/tmp']"))
    assert str(error).startswith("No usable temporary directory found in ['/tmp', '/var/tmp']: they are full, or may")
    assert no_space(OSError(errno.EACCES, "Permission denied", "/data")) is None
