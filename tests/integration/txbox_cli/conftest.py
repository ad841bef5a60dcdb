import logging
from collections.abc import Callable

import pytest

from support.program import Ended
from txbox_cli.app import run


@pytest.fixture
def txbox(
    schema_url: str, aws: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Ended]:
    """Run the program in this process, on the test's own tables and the local SQS."""
    monkeypatch.setenv("TXBOX_DATABASE_URL", schema_url)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])

    def txbox(*arguments: str) -> Ended:
        capsys.readouterr()
        status = run(list(arguments))
        return Ended(status, *capsys.readouterr())

    return txbox
