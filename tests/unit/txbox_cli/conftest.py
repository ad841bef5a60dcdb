import logging
import signal
import sys
from collections.abc import Callable, Iterator

import pytest

from support.program import Ended
from txbox_cli.app import run


@pytest.fixture(autouse=True)
def _hangups_as_in_a_terminal() -> Iterator[None]:
    """Under nohup they are ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def txbox(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Ended]]:
    """Run the program in this process."""
    level = logging.getLogger().level
    forms = {handler: handler.formatter for handler in logging.getLogger().handlers}
    monkeypatch.delenv("TXBOX_DATABASE_URL", raising=False)
    monkeypatch.setattr(sys, "path", sys.path[:])

    def txbox(*arguments: str) -> Ended:
        capsys.readouterr()
        status = run(list(arguments))
        return Ended(status, *capsys.readouterr())

    yield txbox
    logging.getLogger().setLevel(level)
    for handler, form in forms.items():
        handler.setFormatter(form)
