import pytest


@pytest.fixture(autouse=True)
def _short_pauses(short_pauses: None) -> None:
    """No test of workers waits longer than it has to."""
