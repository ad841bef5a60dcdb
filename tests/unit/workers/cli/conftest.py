import sys
from collections.abc import Callable

import pytest

from support.program import Ended
from txbox_workers.cli.app import run


@pytest.fixture
def txbox(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ended]:
    """Run the program in this process."""
    monkeypatch.delenv("TXBOX_DATABASE_URL", raising=False)
    monkeypatch.setattr(sys, "path", sys.path[:])

    def txbox(*arguments: str) -> Ended:
        capsys.readouterr()
        status = run(list(arguments))
        return Ended(status, *capsys.readouterr())

    return txbox
