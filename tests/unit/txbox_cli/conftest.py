import logging
import sys
from collections.abc import Callable, Iterator

import pytest

from support.program import Ended
from txbox_cli.app import run


@pytest.fixture
def txbox(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Ended]]:
    """Run the program in this process."""
    level = logging.getLogger().level
    monkeypatch.delenv("TXBOX_DATABASE_URL", raising=False)
    monkeypatch.setattr(sys, "path", sys.path[:])

    def txbox(*arguments: str) -> Ended:
        capsys.readouterr()
        status = run(list(arguments))
        return Ended(status, *capsys.readouterr())

    yield txbox
    logging.getLogger().setLevel(level)
