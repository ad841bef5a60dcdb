"""Figures over HTTP."""

import urllib.error
import urllib.request

import pytest

from txbox_cli.commands.operate.metrics_server import answering, line
from txbox_cli.errors import CommandFailed


def test_it_answers_what_it_has_and_names_it_otherwise() -> None:
    with answering("127.0.0.1", 0, {"/live": lambda: line(200, "live")}) as port:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/live?x=1", timeout=10) as answer:
            assert answer.read() == b"live\n"
        with pytest.raises(urllib.error.HTTPError, match="404") as raised:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/other", timeout=10)
        raised.value.close()
        with pytest.raises(CommandFailed, match="choose another --port"), answering("127.0.0.1", port, {}):
            pass
