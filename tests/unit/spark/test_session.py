"""What is said when Spark cannot run, and which settings it is given."""

from pathlib import Path

import pytest

from txbox_spark import SparkSetupError, require_jdk
from txbox_spark.session import JDBC_DRIVER, _driver_settings


def java_that_says(directory: Path, text: str) -> str:
    program = directory / "java"
    program.write_text(f"#!/bin/sh\ncat >&2 <<'EOF'\n{text}\nEOF\n")
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize(
    ("says", "major"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "21" 2023-09-19 LTS', 21),
        ('Picked up JAVA_TOOL_OPTIONS: -Xmx1g\nopenjdk version "25-ea"', 25),
    ],
)
def test_a_new_enough_java_is_accepted(tmp_path: Path, says: str, major: int) -> None:
    assert require_jdk(java_that_says(tmp_path, says)) == major


@pytest.mark.parametrize("says", ['java version "1.8.0_402"', 'openjdk version "11.0.2" 2019-01-15'])
def test_an_old_java_is_refused_with_what_to_install(tmp_path: Path, says: str) -> None:
    with pytest.raises(SparkSetupError, match=r"needs a JDK 17 or newer, .* apt-get install"):
        require_jdk(java_that_says(tmp_path, says))


def test_a_java_that_does_not_say_its_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SparkSetupError, match="does not say its version"):
        require_jdk(java_that_says(tmp_path, "hello"))


def test_no_java_is_refused_with_what_to_install() -> None:
    with pytest.raises(SparkSetupError, match="there is no no-such-java; install one"):
        require_jdk("no-such-java")


def test_the_driver_comes_from_maven_without_what_only_its_compiler_needs() -> None:
    assert _driver_settings(None) == {
        "spark.jars.packages": JDBC_DRIVER,
        "spark.jars.excludes": "org.checkerframework:checker-qual",
    }


def test_a_driver_of_ones_own_is_used_as_it_is(tmp_path: Path) -> None:
    jar = tmp_path / "postgresql.jar"
    jar.touch()
    assert _driver_settings(jar) == {"spark.jars": str(jar)}
    with pytest.raises(SparkSetupError, match="no JDBC driver at"):
        _driver_settings(tmp_path / "other.jar")
