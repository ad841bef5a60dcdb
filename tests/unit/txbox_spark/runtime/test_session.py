"""What is said when Spark cannot run, and which settings it is given."""

import os
import re
from pathlib import Path

import pytest

from support.waiting import wait_until
from txbox_spark import SparkSetupError
from txbox_spark.runtime.session import (
    JDBC_DRIVER,
    _driver_settings,
    _HeldStderr,
    _reason,
    _settings,
    mute_jvm,
    require_pyspark,
)


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
        "spark.driver.extraJavaOptions": "-XX:+ExitOnOutOfMemoryError -XX:+DisplayVMOutputToStderr",
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


def test_options_of_ones_own_for_the_jvm_come_after_ours() -> None:
    settings = _settings("load", None, {}, {"spark.driver.extraJavaOptions": "-Xss4m"})
    assert settings["spark.driver.extraJavaOptions"].split() == [
        "-XX:+ExitOnOutOfMemoryError", "-XX:+DisplayVMOutputToStderr", "-Xss4m"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            "WARN x\nException in thread main java.lang.E: no master\n\tat org.apache\n",
            "Exception in thread main .*no master",
        ),
        ("one\ntwo\n\n", "^two$"),
        ("", "without output"),
        ("Exception in thread main [unresolved dependency: org.postgresql#postgresql]", "name its jar: jdbc_jar"),
    ],
)
def test_the_line_that_says_why_is_found(said: str, reason: str) -> None:
    assert re.search(reason, _reason(said))


def test_a_jvm_says_nothing_after_it_was_muted(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_HeldStderr, "muted", False)
    held = _HeldStderr()
    jvm = os.dup(held.writing)
    held.release()
    os.write(jvm, b"ERROR Executor: that matters\n")
    said = wait_until(lambda: capfd.readouterr().err, "it is written on")
    mute_jvm()
    os.write(jvm, b"ERROR TaskSchedulerImpl: Exception in statusUpdate\n")
    os.close(jvm)
    held._reader.join(10)
    assert (said, capfd.readouterr().err) == ("ERROR Executor: that matters\n", "")


@pytest.mark.parametrize(
    ("missing", "said"),
    [("pyspark", "pyspark is missing; install it: "), ("py4j", "pyspark-client cannot start Spark; install pyspark")],
)
def test_a_pyspark_that_cannot_start_spark_is_told(missing: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == missing else object())
    with pytest.raises(SparkSetupError, match=rf"^{said}.*pip install '\.\[spark\]'"):
        require_pyspark()
