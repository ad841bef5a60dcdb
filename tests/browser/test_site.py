"""The documentation in a browser: everyone can read each page, on a phone and in the dark, and search finds it."""

from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from os import environ
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

import pytest

from .conftest import SECONDS, Tab, note_troubles

pytest.importorskip("playwright.sync_api")
pytest.importorskip("mkdocs")
import axe_playwright_python
from mkdocs.commands.build import build
from mkdocs.config import load_config

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser

REPOSITORY = Path(__file__).parents[2]
AXE = Path(axe_playwright_python.__file__).parent / "axe.min.js"
BEYOND = "document.documentElement.scrollWidth - innerWidth"
SCHEMES = {"light": "default", "dark": "slate"}
"""As the browser calls them, and as Material does."""

STRUCTURE = """() => axe.run(
  sessionStorage.framed ? {exclude: [".md-sidebar--primary", "pre span"]} : document,
  {resultTypes: ["violations"], rules: {"color-contrast": {enabled: false}}},
).then(found => { sessionStorage.framed = 1; return found })"""
"""All rules but contrast. The navigation is the same on every page: the first one's is looked at, and its code."""

COLOURS = """async look => {
  const path = (one, up = 5) => one && up ? `${path(one.parentElement, up - 1)} ${one.tagName}.${one.className}` : ""
  const seen = new Set(JSON.parse(sessionStorage.seen ?? "[]"))
  const specimens = [...document.body.querySelectorAll("*")].filter(one => {
    if (!one.checkVisibility() || ![...one.childNodes].some(node => node.nodeType === 3 && node.data.trim())) return
    const style = look + path(one)
    return !seen.has(style) && seen.add(style)
  })
  sessionStorage.seen = JSON.stringify([...seen])
  if (!specimens.length) return {violations: []}
  return axe.run({include: specimens}, {resultTypes: ["violations"], runOnly: ["color-contrast", "link-in-text-block"]})
}"""
"""Contrast is slow, and a matter of style: one specimen of each style for the whole site, by the classes around it."""

SEARCHES = {
    'relation "fresh_event" does not exist': "troubleshooting.html",
    "no database is named": "troubleshooting.html",
    "the connection is in autocommit mode": "troubleshooting.html",
    "this server takes no writes: it is a standby": "troubleshooting.html",
    "processed p-1 with another body": "troubleshooting.html",
    "another alembic history manages txbox's tables": "troubleshooting.html",
    "redrive dead letters": "dead-letters.html",
    "idempotency key": "http.html",
    "alembic": "migrations.html",
    "kubernetes": "kubernetes.html",
    "bulk load": "bulk-loads.html",
    "crash loop": "operating.html",
    "poison message": "dead-letters.html",
    "exactly once": "guarantees.html",
    "kafka": "alternatives.html",
}


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing of each request."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built, or as built before: the folder that TXBOX_TEST_SITE names."""
    if "TXBOX_TEST_SITE" in environ:
        return Path(environ["TXBOX_TEST_SITE"])
    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(REPOSITORY / "mkdocs.yml"), site_dir=str(folder), strict=True))
    return folder


@pytest.fixture
def reader(site: Path, browser: "Browser") -> Iterator[Tab]:
    """A tab on the site."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        with browser.new_context(reduced_motion="reduce") as context:
            context.set_default_timeout(SECONDS * 1000)
            tab = Tab(context.new_page(), f"http://127.0.0.1:{server.server_port}/", [])
            note_troubles(tab)
            yield tab
        server.shutdown()


@pytest.mark.timeout(400)  # 150 s on two cores at a load of 7
def test_everyone_can_read_every_page(site: Path, reader: Tab) -> None:
    """axe-core, the width, errors and requests."""
    axe, wrong = AXE.read_text(), []
    pages = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html") if path.name != "404.html")
    assert "reference/txbox.html" in pages
    schemes = list(SCHEMES.items())
    for path in pages:
        page = reader.go(path)
        page.evaluate(axe)
        looks = []
        for scheme, name in schemes:
            page.emulate_media(color_scheme="light" if scheme == "light" else "dark")
            page.wait_for_function("name => document.body.dataset.mdColorScheme === name", arg=name)
            looks += [(1280, scheme, page.evaluate(COLOURS, f"1280 {scheme}"))]
        looks += [(1280, scheme, page.evaluate(STRUCTURE))]
        wrong += [f"{path} 1280: scrolls sideways"] if page.evaluate(BEYOND) > 0 else []
        page.set_viewport_size({"width": 390, "height": 800})
        looks += [(390, scheme, page.evaluate(COLOURS, f"390 {scheme}"))]
        wrong += [f"{path} 390: scrolls sideways"] if page.evaluate(BEYOND) > 0 else []
        page.set_viewport_size({"width": 1280, "height": 800})
        schemes.reverse()  # the next page begins as this one ends: a switch takes longer than a look
        wrong += [
            f"{path} {width} {scheme}: {one['id']}: {node['html'][:120]} {node['failureSummary']}"
            for width, scheme, look in looks
            for one in look["violations"]
            for node in one["nodes"]
        ]
    assert [*wrong, *reader.troubles] == []


def test_search_finds_the_page_of_a_task_or_an_error(reader: Tab) -> None:
    """Among its first three."""
    page = reader.go("index.html")
    box, pages = page.get_by_role("textbox", name="Search"), page.locator(".md-search-result__item > a:first-of-type")
    box.click()
    missed = {}
    for words, wanted in SEARCHES.items():
        box.fill("")
        box.press("Home")  # Material listens to keys
        page.wait_for_function("!document.querySelector('.md-search-result__item')")
        box.fill(words)
        box.press("End")
        page.wait_for_function("/^\\d|^No/.test(document.querySelector('.md-search-result__meta').innerText)")
        found = [
            str(one.get_attribute("href")).split("/")[-1].partition("?")[0].partition("#")[0] for one in pages.all()[:3]
        ]
        if wanted not in found:
            missed[words] = found
    assert (missed, reader.troubles) == ({}, [])
