"""What is said when Spark cannot run, and which settings it is given."""

import re
from pathlib import Path

import pytest

from txbox_spark import SparkSetupError, require_jdk
from txbox_spark.session import JDBC_DRIVER, _driver_settings, _reason, _settings


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


def test_the_driver_comes_from_maven_without_what_only_its_compiler_needs(tmp_path: Path) -> None:
    assert _driver_settings(None, tmp_path) == {
        "spark.jars.packages": JDBC_DRIVER,
        "spark.jars.excludes": "org.checkerframework:checker-qual",
    }


def test_a_driver_in_the_local_maven_repository_is_used_as_it_is(tmp_path: Path) -> None:
    jar = tmp_path / "org/postgresql/postgresql/42.7.8/postgresql-42.7.8.jar"
    jar.parent.mkdir(parents=True)
    jar.touch()
    assert _driver_settings(None, tmp_path) == {"spark.jars": str(jar)}


def test_a_driver_of_ones_own_is_used_as_it_is(tmp_path: Path) -> None:
    jar = tmp_path / "postgresql.jar"
    jar.touch()
    assert _driver_settings(jar, tmp_path) == {"spark.jars": str(jar)}
    with pytest.raises(SparkSetupError, match="no JDBC driver at"):
        _driver_settings(tmp_path / "other.jar", tmp_path)


def test_a_terminal_stays_readable_and_times_are_utc() -> None:
    assert _settings("load", None, {}, {}) == {
        "spark.app.name": "load",
        "spark.sql.session.timeZone": "UTC",
        "spark.log.level": "ERROR",
        "spark.ui.showConsoleProgress": "false",
    }


@pytest.mark.parametrize(("master", "ui"), [("local", "false"), ("local[2]", "false"), ("spark://host:7077", None)])
def test_a_local_master_has_no_web_page(master: str, ui: str | None) -> None:
    settings = _settings("load", master, {}, {})
    assert (settings["spark.master"], settings.get("spark.ui.enabled")) == (master, ui)


def test_settings_of_ones_own_win() -> None:
    theirs = {"spark.log.level": "INFO", "spark.ui.enabled": "true", "spark.master": "local[4]"}
    assert theirs.items() <= _settings("load", "local[2]", {}, theirs).items()


def test_jars_of_ones_own_do_not_push_the_driver_out() -> None:
    settings = _settings("load", None, {"spark.jars": "/driver.jar"}, {"spark.jars": "/a.jar,/b.jar"})
    assert settings["spark.jars"] == "/driver.jar,/a.jar,/b.jar"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            "WARN x\nException in thread main java.lang.E: no master\n\tat org.apache\n",
            "Exception in thread main .*no master",
        ),
        ("one\ntwo\n\n", "^two$"),
        ("", "without a word"),
        ("Exception in thread main [unresolved dependency: org.postgresql#postgresql]", "name its jar: jdbc_jar"),
    ],
)
def test_the_line_that_says_why_is_found(said: str, reason: str) -> None:
    assert re.search(reason, _reason(said))
