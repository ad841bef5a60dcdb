"""The pages in a real browser: what they show, keep and recover from, and whether everyone can use them."""

from collections.abc import Callable

import pytest
from sqlalchemy import Engine

from support.postgres.statements import run
from support.postgres.tcp_proxy import TcpProxy
from txbox import DeadLetter, DeadLetters, Reason
from txbox.operator_actions import note_action
from txbox.pauses import pause
from txbox_dashboard.app import PLACES

from .conftest import TOKEN, Tab, sign_in
from .shop import ORDER, RUN, open_shop

pytest.importorskip("playwright.sync_api")
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser

HOSTILE = "<img src=x onerror=alert(1)>'\"&{{ 7*7 }}"


def paths(query: dict[str, str]) -> list[str]:
    """Each page, with what it is asked for; a page that is forgotten here fails by its absence."""
    return [f"{place.path}?{query.get(place.path, '')}" for place in PLACES]


SHOP = {
    "/subscriber": "id=billing",
    "/message": f"id={ORDER}",
    "/letter": "number=1",
    "/letters/confirm": "action=redrive&numbers=1",
    "/loads": f"run={RUN}",
}


def park(engine: Engine, message_id: str, error: str = "ValueError: no", subscriber_id: str = "billing") -> int:
    with engine.begin() as connection:
        letter = DeadLetter(
            subscriber_id=subscriber_id, message_id=message_id, reason=Reason.FAILED, error=error, attempts=3,
            source="memory", body=b"{}", headers={}, envelope={},
        )  # fmt: skip
        return DeadLetters(engine).park_in(connection, letter)


def audit_of(page: Page, *rules: str) -> list[str]:
    """What axe-core finds, by these rules or all: rule, impact, and the elements."""
    options: dict[str, object] = {"resultTypes": ["violations"]} | ({"runOnly": list(rules)} if rules else {})
    found = Axe().run(page, options=options).response["violations"]
    return [f"{one['id']} ({one['impact']}): {[node['target'] for node in one['nodes']][:3]}" for one in found]


def width_beyond(page: Page) -> int:
    return int(page.evaluate("document.documentElement.scrollWidth - innerWidth"))


def test_every_page_loads_without_a_fault_and_everyone_can_use_it(
    open_tab: Callable[..., Tab], engine: Engine, serve: Callable[..., str]
) -> None:
    """With data: errors, the security policy, requests; axe-core, in the dark its contrasts; a phone's width."""
    wrong = []
    with open_shop(engine):
        tab = open_tab(serve(show_bodies=True))
        for path in paths(SHOP):
            page = tab.go(path)
            expect(page.get_by_role("heading", level=1)).to_be_visible()
            wrong += [f"{path}: {one.inner_text()}" for one in page.locator("#live .note ul").all()]
            wrong += [f"{path}: {one}" for one in audit_of(page)]
            page.emulate_media(color_scheme="dark")
            wrong += [f"{path} dark: {one}" for one in audit_of(page, "color-contrast")]
            page.emulate_media(color_scheme="light")
            page.set_viewport_size({"width": 390, "height": 800})
            wrong += [f"{path} on a phone: {width} pixels too wide"] if (width := width_beyond(page)) > 0 else []
            page.set_viewport_size({"width": 1280, "height": 800})
    assert wrong + tab.troubles == []


def test_every_page_of_an_empty_database_loads_without_a_fault(tab: Tab) -> None:
    wrong = []
    for path in paths({}):
        wrong += [f"{path}: {one}" for one in audit_of(tab.go(path))]
    # A letter, a message or a load that is not there is answered with 404, as it should be.
    assert wrong + [one for one in tab.troubles if "404" not in one] == []


def test_what_messages_hold_is_text_on_every_page(tab: Tab, engine: Engine) -> None:
    number = park(engine, HOSTILE, HOSTILE, HOSTILE)
    pause(engine, subscriber_id=HOSTILE, by=HOSTILE, note=HOSTILE)
    with engine.begin() as connection:
        note_action(connection, "pause", HOSTILE, by=HOSTILE, detail={"note": HOSTILE})
    run(
        engine,
        "INSERT INTO reported_activity (kind, name, minute, figure, count) "
        "VALUES ('subscriber', %s, date_trunc('minute', now()), 'processed', 3)",
        (HOSTILE,),
    )
    run(
        engine,
        "INSERT INTO message_lease (subscriber_id, message_id, fence, attempts, owner, acquired_at, expires_at) "
        "VALUES (%s, %s, 1, 1, %s, now(), now() + interval '1 h')",
        (HOSTILE, HOSTILE, HOSTILE),
    )
    run(
        engine,
        "INSERT INTO bulk_load (run_id, subscriber_id, source, digest, writer, chunks, bounds, error) "
        "VALUES ('r1', %s, %s, '', 'copy', 5, '[]', %s)",
        (HOSTILE, HOSTILE, HOSTILE),
    )
    run(
        engine,
        "INSERT INTO outbox_message (message_id, destination, body, lane, headers) VALUES ('m1', %s, '', 0, '{}')",
        (HOSTILE,),
    )
    page = tab.page
    for path in ("/", "/letters", f"/letter?number={number}", "/outbox", "/leases", "/loads?run=r1", "/maintenance"):
        tab.go(path)
        expect(page.locator("#live")).to_contain_text(HOSTILE)
        assert page.locator("main img").count() == 0
    tab.go("/")
    page.locator("tbody a", has_text=HOSTILE).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(HOSTILE)
    expect(page.locator("txbox-chart .u-legend")).to_contain_text("processed")
    page.get_by_label("Message id").fill(HOSTILE)
    page.get_by_role("button", name="Find").click()
    expect(page.locator("#live")).to_contain_text(HOSTILE)
    assert page.locator("main img").count() == 0
    assert tab.troubles == []


def test_a_page_shows_what_changes_and_keeps_what_is_typed(tab: Tab, engine: Engine) -> None:
    park(engine, "first")
    page = tab.go("/letters")
    typed = page.get_by_label("In the error")
    typed.fill("card")
    typed.focus()
    park(engine, "second")
    expect(page.locator("#live")).to_contain_text("second")
    expect(typed).to_have_value("card")
    expect(typed).to_be_focused()
    link = page.get_by_role("link", name="second")
    link.focus()
    park(engine, "third")
    expect(page.locator("#live")).to_contain_text("third")
    expect(link).to_be_focused()
    page.get_by_role("button", name="Stop updates").click()
    again = page.get_by_role("button", name="Update again")
    with page.expect_request(lambda _: True) as no_more:  # a second page's, so that time is known to have passed
        park(engine, "fourth")
        page.evaluate("new Promise(done => setTimeout(done, 3 * PACE_MS)).then(() => fetch('/static/icon.svg'))")
    assert no_more.value.url.endswith("icon.svg")
    expect(page.locator("#live")).not_to_contain_text("fourth")
    again.click()
    expect(page.locator("#live")).to_contain_text("fourth")
    assert tab.troubles == []


def test_letters_are_chosen_and_redriven_and_the_other_tab_shows_it(
    acting: Tab, open_tab: Callable[..., Tab], engine: Engine
) -> None:
    first, second = park(engine, "a"), park(engine, "b")
    other = open_tab(acting.root)
    sign_in(other)
    watched = other.go("/letters")
    page = acting.go("/letters")
    page.get_by_label(f"Choose letter {first}").check()
    page.get_by_role("button", name="Redrive the chosen").click()
    expect(page.locator("main")).to_contain_text("1 letter would be sent through again")
    page.get_by_label("Why").fill("the card service is back")
    page.get_by_role("button", name="Redrive").click()
    for one in (page, watched):
        line = one.get_by_role("region", name="Redrives and discards").locator("tbody tr")
        expect(line).to_contain_text("finished")
        expect(line).to_contain_text("the card service is back")
        expect(line).to_contain_text("anna")
        expect(one.get_by_role("region", name="Dead letters").locator("tbody tr")).to_have_count(1)
        expect(one.get_by_role("link", name=str(second), exact=True)).to_be_visible()
    assert acting.troubles + other.troubles == []


def test_a_lost_database_is_said_and_what_was_shown_stays_until_it_is_back(
    open_tab: Callable[..., Tab], serve: Callable[..., str], engine: Engine, proxied: Engine, proxy: TcpProxy
) -> None:
    park(engine, "kept")
    tab = open_tab(serve(on=proxied))
    page = tab.go("/letters")
    proxy.refuse()
    proxy.cut()
    banner = page.get_by_role("alert")
    expect(banner).to_contain_text("The database cannot be used. What is shown is from")
    expect(page.locator("#live")).to_contain_text("kept")
    proxy.accept()
    park(engine, "later")
    expect(page.locator("#live")).to_contain_text("later")
    expect(banner).to_be_hidden()
    assert [one for one in tab.troubles if "503" not in one] == []


def test_only_the_token_lets_a_person_in(open_tab: Callable[..., Tab], serve: Callable[..., str]) -> None:
    tab = open_tab(serve(token=TOKEN))
    page = tab.go("/letters")
    expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")
    assert audit_of(page) == []
    sign_in(tab, "not this one at all")
    expect(page.get_by_role("alert").filter(has_text="This is not the token")).to_be_visible()
    sign_in(tab)
    expect(page.get_by_role("heading", level=1)).to_have_text("Overview")
    page.get_by_role("button", name="Sign out anna").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")
    assert [one for one in tab.troubles if "403" not in one] == []


def test_the_keyboard_reaches_everything_in_the_order_of_the_page(tab: Tab, engine: Engine) -> None:
    park(engine, "a")
    page = tab.go("/")
    reached = []
    for _ in range(14):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.innerText || document.activeElement.id"))
    pages = [place.title for place in PLACES if place.in_navigation]
    assert reached[:1] == ["To the content"]
    assert reached[1 : 2 + len(pages)] == ["txbox", *pages]
    assert reached[2 + len(pages) : 5 + len(pages)] == ["find-id", "Find", "Stop updates"]
    assert "billing" in reached
    tab.go("/")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#live")).to_be_focused()
