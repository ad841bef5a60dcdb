"""Errors that cannot be logged as usual."""

import logging

import pytest

from txbox.error_logging import log_failure


class Unprintable(Exception):
    """An error without a text."""

    def __str__(self) -> str:
        raise ValueError("no text for you")


def test_a_log_that_raises_goes_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise SystemExit(1)

    for name in ("exception", "error"):
        monkeypatch.setattr(logging.getLogger("txbox.threads"), name, broken)
    try:
        raise Unprintable
    except Unprintable:
        log_failure("it failed")
