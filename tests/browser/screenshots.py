"""Takes the documentation's pictures of the dashboard: tests/browser/run.sh python tests/browser/screenshots.py."""

import os
import re
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from io import BytesIO
from pathlib import Path
from urllib.parse import urljoin

from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright
from sqlalchemy import Engine, create_engine

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from browser.shop import ORDER, RUN, open_shop
from txbox_dashboard import dashboard
from txbox_demo.page_server import serving
from txbox_local import LocalPostgres
from txbox_migrations import upgrade_database

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "screenshots"
MOST_BYTES = 120_000
COLOURS = 128
WIDTH, HEIGHT = 1280, 800
PHONE = (390, 844)
LOADS, WARM_MS = 25, 60
TOKEN = "correct horse battery staple"
CONFIRM = "letters/confirm?action=redrive&chosen=yes&number=3&number=4"

PAGES = {
    "overview": "",
    "subscriber": "subscriber?id=billing",
    "letters": "letters",
    "message": f"message?id={ORDER}",
    "outbox": "outbox",
    "leases": "leases",
    "loads": f"loads?run={RUN}",
    "maintenance": "maintenance",
}


def main() -> int:
    """Write every picture; 1 if one is too large."""
    FOLDER.mkdir(exist_ok=True)
    program = os.environ["TXBOX_TEST_BROWSER"]
    with (
        _shop() as engine,
        serving(dashboard(engine), socket.create_server(("127.0.0.1", 0))) as root,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        sizes = {name: _take(browser, root + path, name) for name, path in PAGES.items()}
        sizes["overview-dark"] = _take(browser, root, "overview-dark", dark=True)
        sizes["overview-phone"] = _take(browser, root, "overview-phone", size=PHONE)
        with serving(
            dashboard(engine, allow_actions=True, token=TOKEN, send=lambda _letter: None),
            socket.create_server(("127.0.0.1", 0)),
        ) as acting:
            sizes["letters-chosen"] = _take(browser, acting + "letters", "letters-chosen", prepare=_choose)
            sizes["confirm"] = _take(browser, acting + CONFIRM, "confirm", prepare=_say_why)
        browser.close()
    for name, size in sizes.items():
        sys.stdout.write(f"{name}: {size:,} bytes{', TOO LARGE' if size > MOST_BYTES else ''}\n")
    return int(max(sizes.values()) > MOST_BYTES)


@contextmanager
def _shop() -> Iterator[Engine]:
    with ExitStack() as open_:
        engine = create_engine(open_.enter_context(LocalPostgres()).url, pool_size=20)
        open_.callback(engine.dispose)
        upgrade_database(engine)
        open_.enter_context(open_shop(engine))
        yield engine


def _choose(page: Page) -> None:
    for number in (3, 4):
        page.get_by_label(f"Choose letter {number}").check()


def _say_why(page: Page) -> None:
    page.get_by_label("Why").fill("The card service is back.")


def _sign_in(page: Page, url: str) -> None:
    page.goto(urljoin(url, "/sign-in"))
    page.get_by_label("Your name").fill("maria")
    page.get_by_label("Token").fill(TOKEN)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url(urljoin(url, "/"))


def _take(
    browser: Browser,
    url: str,
    name: str,
    *,
    size: tuple[int, int] = (WIDTH, HEIGHT),
    dark: bool = False,
    prepare: Callable[[Page], None] | None = None,
) -> int:
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]},
        color_scheme="dark" if dark else "light",
        reduced_motion="reduce",
    )
    page = context.new_page()
    if prepare is not None:
        _sign_in(page, url)
    for _ in range(LOADS):  # the first ones read more than the next: the catalogs of new connections
        page.goto(url)
        if int(re.findall(r"read in (\d+) ms", page.locator("footer").inner_text())[0]) <= WARM_MS:
            break
    if prepare is not None:
        prepare(page)
    else:
        expect(page.locator("#pace")).to_be_visible()  # the scripts have run
    expect(page.locator("txbox-chart:not(:has(canvas))")).to_have_count(0)
    picture = Image.open(BytesIO(page.screenshot(full_page=size == PHONE)))
    context.close()
    file = FOLDER / f"{name}.png"
    picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(file, optimize=True)
    return file.stat().st_size


if __name__ == "__main__":
    sys.exit(main())
