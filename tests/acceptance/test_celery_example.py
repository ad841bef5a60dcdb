"""The example with Celery runs as its README says, where there is a Redis."""

import shutil
from pathlib import Path

import pytest

from support.documents import run_readme


@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("redis-server") is None, reason="no redis-server; make test-containers installs it")
def test_what_the_readme_of_the_example_shows_works(tmp_path: Path) -> None:
    run_readme("celery_billing", tmp_path)
