"""What must not run side by side is kept together, in one process of the run, and begins first."""

import os
import subprocess
import sys
from pathlib import Path

from support.side_by_side import GROUPS, group_of

REPOSITORY = Path(__file__).parents[2]
TEST = """
import os, pytest

@pytest.mark.parametrize("number", range(6))
def test_it(number):
    with open("order", "a") as file:
        file.write(f"{os.environ['PYTEST_XDIST_WORKER']} {__file__}\\n")
"""


def test_the_groups_are_of_tests_that_there_are() -> None:
    for place in GROUPS:
        assert (REPOSITORY / place).exists()
    assert group_of("tests/acceptance/spark/test_kills.py::test_x[1]") == "spark"
    assert group_of("tests/acceptance/demo/test_exact.py::test_x") == "demo"
    assert group_of("tests/integration/txbox_spark/loading/test_staging.py::test_x") == "spark 2"
    assert group_of("tests/integration/txbox_testing/test_loads.py::test_x[copy]") == "spark 2"
    assert group_of("tests/integration/txbox_spark/test_sink.py::test_x") == "spark"
    assert group_of("tests/unit/txbox_spark/test_options.py::test_x") is None


def test_a_group_runs_in_one_process_and_first(tmp_path: Path) -> None:
    places = ("unit/a", "integration/txbox_spark", "acceptance/spark", "unit/b")
    for place in places:
        folder = tmp_path / "tests" / place
        folder.mkdir(parents=True)
        (folder / f"test_{place.replace('/', '_')}.py").write_text(TEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("-p", "xdist", "-p", "support.side_by_side"),
            *("-n", "2", "--dist", "loadgroup", "--no-loadscope-reorder", "--import-mode=importlib"),
            *(f"tests/{place}" for place in places),
        ],
        cwd=tmp_path,
        # Other plugins take seconds.
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "tests"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    ran = [line.split() for line in (tmp_path / "order").read_text().splitlines()]
    assert len(ran) == 24
    of_spark = [(number, worker) for number, (worker, file) in enumerate(ran) if "spark" in file]
    assert len({worker for _, worker in of_spark}) == 1
    workers = {worker for worker, _ in ran}
    assert len(workers) == 2
    assert "spark" in next(file for worker, file in ran if worker == of_spark[0][1])
