"""A dashboard on the test's schema, and clients that have signed in."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from sqlalchemy import Engine
from starlette.testclient import TestClient

from txbox_dashboard import dashboard

TOKEN = "correct horse battery staple"


@pytest.fixture
def open_dashboard(engine: Engine) -> Iterator[Callable[..., TestClient]]:
    """Make a dashboard with these options, and a client of it."""
    with ExitStack() as clients:

        def make(**options: Any) -> TestClient:
            app = dashboard(engine, **options)
            return clients.enter_context(TestClient(app, base_url="http://127.0.0.1:8790", follow_redirects=False))

        yield make


@pytest.fixture
def pages(open_dashboard: Callable[..., TestClient]) -> TestClient:
    """One that only reads."""
    return open_dashboard()


@pytest.fixture
def open_acting(open_dashboard: Callable[..., TestClient]) -> Callable[..., TestClient]:
    """Make one with actions and these options, and a client who has signed in: open_acting("anna", **options)."""

    def make(name: str = "anna", **options: Any) -> TestClient:
        client = open_dashboard(allow_actions=True, token=TOKEN, **options)
        assert client.post("/sign-in", data={"name": name, "token": TOKEN}).status_code == 303
        return client

    return make


@pytest.fixture
def acting(open_acting: Callable[..., TestClient]) -> TestClient:
    """One with actions; anna has signed in."""
    return open_acting()
