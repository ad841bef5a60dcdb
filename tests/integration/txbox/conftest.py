"""Inboxes of one subscriber, and threads to use them in."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from txbox import Inbox


@pytest.fixture
def inbox() -> Inbox:
    """An inbox whose waits outlast every test: who runs into the bound without meaning to fails."""
    return Inbox("billing", wait_seconds=60)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool
