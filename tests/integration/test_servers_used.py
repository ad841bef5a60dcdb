"""A run of the tests says on its last lines which servers it used."""

import os
import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
OF_THE_DATABASE = (
    "tests/integration/txbox/inbox/test_inbox.py::test_the_longest_id_of_the_longest_subscriber_fits_into_the_key"
)
OF_A_QUEUE = "tests/integration/txbox_aws/test_sqs_worker.py::test_start_refuses_a_queue_that_does_not_exist"


def last_lines(database_url: str, *arguments: str) -> list[str]:
    """Run tests against the server of this run, and return what is said after the last of them."""
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "timeout", "-q", *arguments],
        cwd=REPOSITORY,
        env={
            **os.environ,
            "TXBOX_TEST_DATABASE_URL": database_url,
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout.rpartition("[100%]\n")[2].splitlines()


def named(line: str) -> bool:
    return bool(re.fullmatch(r"Postgres used: \d+\.\d+.* \(TXBOX_TEST_DATABASE_URL\)", line))


def test_the_last_lines_of_a_run_in_two_processes_name_the_servers_they_used(database_url: str) -> None:
    postgres, sqs, passed = last_lines(database_url, "-p", "xdist", "-n", "2", OF_THE_DATABASE, OF_A_QUEUE)
    assert named(postgres)
    assert re.fullmatch(r"SQS used: moto \d+\.\d+\.\d+.* \(local\)", sqs)
    assert " passed in " in passed
