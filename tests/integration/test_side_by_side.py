"""What must not run side by side is kept together, in one process of the run."""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
ALONE = "tests/unit/test_makefile.py"


def test_the_tests_of_spark_and_of_the_demo_are_groups() -> None:
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q"),
            *("-m", "not xdist_group(name='spark') and not xdist_group(name='demo')"),
            *("tests/integration/spark", "tests/acceptance/test_demo.py", ALONE),
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    files = {line.partition("::")[0] for line in ended.stdout.splitlines() if "::" in line}
    assert files == {ALONE}
