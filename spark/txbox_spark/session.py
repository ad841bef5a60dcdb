"""Spark sessions that can reach Postgres over JDBC."""

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from txbox import TxboxError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["JDBC_DRIVER", "MINIMUM_JAVA", "SparkSetupError", "require_jdk", "spark_session"]

JDBC_DRIVER = "org.postgresql:postgresql:42.7.8"
"""Maven coordinates of the JDBC driver."""

UNUSED_BY_THE_DRIVER = "org.checkerframework:checker-qual"
"""A dependency of the driver that is needed only to compile it."""

MINIMUM_JAVA = 17
"""What Spark 4 needs."""


class SparkSetupError(TxboxError):
    """Spark cannot run on this machine; the message says what to install."""


def require_jdk(java: str = "java") -> int:
    """See that a Java is there that Spark can use.

    Args:
        java: the program, by name or path.

    Returns:
        Its major version.

    Raises:
        SparkSetupError: there is none, or it is too old.
    """
    program = shutil.which(java)
    if program is None:
        raise SparkSetupError(f"Spark needs a JDK {MINIMUM_JAVA} or newer, and there is no {java}; {_INSTALL}")
    answer = subprocess.run([program, "-version"], capture_output=True, text=True, check=False, timeout=60)
    version = re.search(r'version "(?:1\.)?(\d+)', answer.stderr + answer.stdout)
    if version is None:
        raise SparkSetupError(f"{program} does not say its version; {_INSTALL}")
    if int(version.group(1)) < MINIMUM_JAVA:
        raise SparkSetupError(f"Spark needs a JDK {MINIMUM_JAVA} or newer, {program} is {version.group(1)}; {_INSTALL}")
    return int(version.group(1))


def spark_session(
    name: str = "txbox",
    *,
    master: str | None = None,
    jdbc_jar: Path | None = None,
    settings: Mapping[str, str] | None = None,
) -> "SparkSession":
    """Start a Spark session, or return the one that runs.

    Args:
        name: the application's name.
        master: such as ``local[2]``; None leaves it to spark-submit.
        jdbc_jar: the JDBC driver as a file, where Maven Central cannot be reached; None has Spark fetch it, once.
        settings: more of Spark's own settings; they win over ours.

    Raises:
        SparkSetupError: pyspark or a JDK is missing.
    """
    try:
        from pyspark.sql import SparkSession
    except ModuleNotFoundError as error:
        raise SparkSetupError("pyspark is missing; install it: pip install 'txbox[spark]'") from error
    require_jdk()
    builder = SparkSession.builder.appName(name)
    if master is not None:
        builder = builder.master(master)
    for key, value in {**_driver_settings(jdbc_jar), "spark.sql.session.timeZone": "UTC", **(settings or {})}.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def _driver_settings(jdbc_jar: Path | None) -> dict[str, str]:
    if jdbc_jar is None:
        return {"spark.jars.packages": JDBC_DRIVER, "spark.jars.excludes": UNUSED_BY_THE_DRIVER}
    if not jdbc_jar.is_file():
        raise SparkSetupError(f"there is no JDBC driver at {jdbc_jar}")
    return {"spark.jars": str(jdbc_jar)}


_INSTALL = "install one (Debian and Ubuntu: apt-get install openjdk-17-jre-headless)"
