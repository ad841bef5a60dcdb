"""Inboxes of one subscriber."""

import pytest

from txbox import Inbox


@pytest.fixture
def inbox() -> Inbox:
    """An inbox whose waits outlast every test: who runs into the bound without meaning to fails."""
    return Inbox("billing", wait_seconds=60)
