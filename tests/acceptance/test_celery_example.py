"""The example with Celery runs as its README says; Valkey stands in for Redis."""

import os
from pathlib import Path

import pytest

from support.celery_shop.server import valkey_server
from support.documents import run_readme

pytestmark = pytest.mark.slow  # `make test-pages` runs it, as does CI


@pytest.mark.timeout(300)
def test_what_the_readme_of_the_example_shows_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "redis-server").symlink_to(valkey_server())
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    run_readme("celery_billing", tmp_path / "example")
