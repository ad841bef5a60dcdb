"""Takes the documentation's pictures of the dashboard: tests/browser/run.sh python tests/browser/screenshots.py."""

import os
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, expect, sync_playwright
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


def _take(browser: Browser, url: str, name: str, *, size: tuple[int, int] = (WIDTH, HEIGHT), dark: bool = False) -> int:
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]},
        color_scheme="dark" if dark else "light",
        reduced_motion="reduce",
    )
    page = context.new_page()
    for _ in range(LOADS):  # the first ones read more than the next: the catalogs of new connections
        page.goto(url)
        if int(re.findall(r"read in (\d+) ms", page.locator("footer").inner_text())[0]) <= WARM_MS:
            break
    expect(page.locator("#pace")).to_be_visible()  # the scripts have run
    expect(page.locator("txbox-chart:not(:has(canvas))")).to_have_count(0)
    picture = Image.open(BytesIO(page.screenshot(full_page=size == PHONE)))
    context.close()
    file = FOLDER / f"{name}.png"
    picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(file, optimize=True)
    return file.stat().st_size


if __name__ == "__main__":
    sys.exit(main())
