"""Calls of Java that an interruption has broken the connection of."""

import pytest
from py4j.protocol import Py4JNetworkError

from txbox_spark.runtime.jobs import CALL_ATTEMPTS, _insist


class Java:
    """Does not answer the first times."""

    def __init__(self, silent: int) -> None:
        self.silent = silent
        self.heard: list[str] = []

    def call(self, word: str) -> None:
        if self.silent:
            self.silent -= 1
            raise Py4JNetworkError("Answer from Java side is empty")
        self.heard.append(word)


@pytest.mark.parametrize("silent", range(CALL_ATTEMPTS))
def test_java_is_called_until_it_answers(silent: int) -> None:
    java = Java(silent)
    _insist(java.call, "cancel")
    assert java.heard == ["cancel"]


def test_a_java_that_is_gone_is_told() -> None:
    with pytest.raises(Py4JNetworkError):
        _insist(Java(CALL_ATTEMPTS).call, "cancel")
