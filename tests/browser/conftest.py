"""A browser for the run, and for each test a dashboard on its schema and tabs that note all that goes wrong."""

import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib import import_module
from os import environ
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from sqlalchemy import Engine

from txbox_dashboard import dashboard
from txbox_demo.page_server import serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

TOKEN = "correct horse battery staple"

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
"""As run.sh looks for them."""

SECONDS = 15
"""How long a page may take to show something: two seconds of its pace, and a machine that has much to do."""


class Tab(NamedTuple):
    """A tab of its own session, and what went wrong in it."""

    page: "Page"
    root: str
    troubles: list[str]

    def go(self, path: str) -> "Page":
        self.page.goto(self.root + path.removeprefix("/"))
        return self.page


if "TXBOX_TEST_BROWSER" in environ:
    import_module("playwright.sync_api")  # asked for by run.sh: what is missing fails, and skips nothing


@pytest.fixture(scope="session")
def browser() -> Iterator["Browser"]:
    sync_api = pytest.importorskip("playwright.sync_api")
    program = environ.get("TXBOX_TEST_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip("there is no browser: make test-browser installs one")
    with sync_api.sync_playwright() as playwright:
        sync_api.expect.set_options(timeout=SECONDS * 1000)
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def serve(engine: Engine) -> Iterator[Callable[..., str]]:
    """Serve a dashboard with these options, and return its URL: serve(on=engine)."""
    with ExitStack() as served:

        def start(on: Engine = engine, **options: Any) -> str:
            listener = socket.create_server(("127.0.0.1", 0))
            return served.enter_context(serving(dashboard(on, **options), listener))

        yield start


@pytest.fixture
def open_tab(browser: "Browser", serve: Callable[..., str]) -> Iterator[Callable[..., Tab]]:
    """Open a tab: open_tab(root, width=1280, dark=False). Without a root, on a dashboard that only reads."""
    with ExitStack() as opened:

        def make(root: str | None = None, *, width: int = 1280, height: int = 800, dark: bool = False) -> Tab:
            context = browser.new_context(
                viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
            )
            opened.callback(context.close)
            context.set_default_timeout(SECONDS * 1000)
            tab = Tab(context.new_page(), root or serve(), [])
            note_troubles(tab)
            return tab

        yield make


@pytest.fixture
def tab(open_tab: Callable[..., Tab]) -> Tab:
    """One on a dashboard that only reads."""
    return open_tab()


@pytest.fixture
def acting(open_tab: Callable[..., Tab], serve: Callable[..., str]) -> Tab:
    """One with actions; anna has signed in. What is redriven is sent nowhere."""
    tab = open_tab(serve(allow_actions=True, token=TOKEN, send=lambda _letter: None))
    sign_in(tab)
    return tab


def sign_in(tab: Tab, token: str = TOKEN, name: str = "anna") -> None:
    fill_in(tab.go("/sign-in"), token, name)


def fill_in(page: "Page", token: str = TOKEN, name: str = "anna") -> None:
    page.get_by_label("Your name").fill(name)
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Sign in").click()


def note_troubles(tab: Tab) -> None:
    """Note errors, violations of the security policy (errors of the console, too), and requests that fail or leave."""
    page, troubles = tab.page, tab.troubles
    page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
    page.on("console", lambda said: troubles.append(f"{said.type}: {said.text}") if said.type != "log" else None)
    # A page that is left ends its own requests.
    page.on(
        "requestfailed",
        lambda one: troubles.append(f"failed: {one.url}") if "ERR_ABORTED" not in str(one.failure) else None,
    )
    page.on("response", lambda one: troubles.append(f"{one.status}: {one.url}") if one.status >= 400 else None)
    page.on("request", lambda one: None if one.url.startswith(tab.root) else troubles.append(f"elsewhere: {one.url}"))
