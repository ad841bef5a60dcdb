"""Creates what PostgreSQL calls a cluster: the data directory, with a superuser, a password and one database."""

import os
import secrets
import shutil
from pathlib import Path

from txbox_local.errors import LocalServerError, server_failed
from txbox_local.postgres.directory import ServerDirectory
from txbox_local.postgres.installation import Installation, ServiceUser

PASSWORD_BYTES = 24


def ensure_cluster(
    installation: Installation, directory: ServerDirectory, *, user: str, database: str, durable: bool
) -> str:
    """Create the data directory with the database, unless it exists. Return the password.

    The caller holds the directory's lock. With ``durable``, what is created survives a crash of the machine.

    Raises:
        LocalServerError: the directory could not be created, or exists without its password.
    """
    if directory.data.exists():
        try:
            return directory.password.read_text(encoding="ascii").strip()
        except FileNotFoundError:
            raise LocalServerError(
                f"{directory.data} exists but {directory.password} does not: restore it, or name another directory"
            ) from None
    password = secrets.token_urlsafe(PASSWORD_BYTES)
    new = directory.path / "data.new"  # renamed when complete: after a kill in between, the next start begins anew
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(mode=0o700)
    if installation.user is not None:
        os.chown(new, installation.user.uid, installation.user.gid)
    _write_private(directory.password, password)
    password_for_initdb = directory.path / "password.new"
    _write_private(password_for_initdb, password, installation.user)
    unsynced = [] if durable else ["--no-sync"]
    # The builtin provider sorts and folds UTF-8 alike on every system, whatever locales that system has.
    _must_succeed(
        installation,
        "initdb",
        f"--pgdata={new}",
        f"--username={user}",
        f"--pwfile={password_for_initdb}",
        "--auth=scram-sha-256",
        "--encoding=UTF8",
        "--locale=C",
        "--locale-provider=builtin",
        "--builtin-locale=C.UTF-8",
        "--no-instructions",
        "--set=timezone=UTC",
        "--set=log_timezone=UTC",
        *unsynced,
    )
    fast = [] if durable else ["-c", "fsync=off"]
    _must_succeed(
        installation, "postgres", "--single", "-D", str(new), *fast, "postgres", stdin=f"CREATE DATABASE {database}\n"
    )
    password_for_initdb.unlink()
    new.rename(directory.data)
    return password


def _write_private(path: Path, text: str, user: ServiceUser | None = None) -> None:
    """Write a file that only its owner can read: `user`, or else the current user."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        if user is not None:
            os.fchown(descriptor, user.uid, user.gid)
        file.write(text + "\n")


def _must_succeed(installation: Installation, program: str, *arguments: str, stdin: str = "") -> None:
    result = installation.run(program, *arguments, stdin=stdin)
    # In single-user mode an error in a statement is reported, but the exit status is still 0.
    if result.returncode or "ERROR:" in result.stderr:
        raise server_failed(program, (result.stdout + result.stderr).strip())
