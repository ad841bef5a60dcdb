"""The pages in a real browser: what they show, keep and recover from, and whether everyone can use them."""

from collections.abc import Callable, Mapping
from urllib.parse import urlencode

import pytest
from sqlalchemy import Engine

from support.postgres.tcp_proxy import TcpProxy
from txbox import DeadLetter, DeadLetters, Reason
from txbox.dead_letters import LetterFilter, LetterOperations, OperationKind
from txbox.operations.actions import note_action
from txbox.operations.pauses import pause
from txbox_dashboard.app import PLACES

from .conftest import TOKEN, Tab, fill_in, sign_in
from .shop import ORDER, RUN, open_shop

pytest.importorskip("playwright.sync_api")
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser

HOSTILE = (
    "\u202egnissecorp<img src=x onerror=globalThis.ran=1>'\"&{{ 7*7 }}<script>globalThis.ran=1</script>"
    "</td></table>next\nline\t\u2067\u200f%0d" + "w" * 300
)
"""Markup, a script, marks that turn what follows, lines, and a word without end."""

MARKS = "[\\u202e\\u2067\\u200f]"

TURNED = """
([hostile, marks]) => {
  const turned = [], walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  const place = (node, at) => {
    const range = document.createRange();
    range.setStart(node, at);
    range.setEnd(node, at + 1);
    return range.getBoundingClientRect();
  };
  for (let node; (node = walker.nextNode());) {
    if (new RegExp(marks).test(node.data)) {
      const after = node.data.split(hostile).at(-1);
      if (/[a-z]/.test(after)) turned.push(`stands behind it: ${after}`);
      if (getComputedStyle(node.parentElement).display === "inline") turned.push(`in no box of its own: ${node.data}`);
    } else if (/[a-z]{2}/.test(node.data)) {
      const at = node.data.search(/[a-z]{2}/), [first, next] = [place(node, at), place(node, at + 1)];
      if (first.width && first.top === next.top && next.left < first.left) turned.push(`turned: ${node.data}`);
    }
  }
  return turned;
}
"""
"""What is not told apart from a hostile text, and what is turned by one."""

BROKEN = """
() => {
  const broken = [], range = new Range(), walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode());) for (const { 0: word, index } of node.data.matchAll(/[A-Za-z]{2,20}/g)) {
    range.setStart(node, index);
    range.setEnd(node, index + word.length);
    if (new Set([...range.getClientRects()].map((one) => one.top)).size > 1) broken.push(word);
  }
  return broken;
}
"""
"""Words that stand on two lines."""

PACE_MS = 2000
"""As in site.js."""

OUTLINED = "getComputedStyle(document.activeElement).outlineStyle !== 'none'"
"""Whether what has the focus is seen to have it."""

SPREAD = """
INSERT INTO reported_activity (kind, name, minute, figure, count)
VALUES ('subscriber', %(text)s, date_trunc('minute', now()), 'processed', 3);
INSERT INTO message_lease (subscriber_id, message_id, fence, attempts, owner, acquired_at, expires_at)
VALUES (%(text)s, %(text)s, 1, 1, %(text)s, now(), now() + interval '1 h');
INSERT INTO message_failure (subscriber_id, message_id, attempts, error, history)
VALUES (%(text)s, %(text)s, 1, %(text)s, '[]');
INSERT INTO bulk_load (run_id, subscriber_id, source, digest, writer, chunks, bounds, error)
VALUES ('r1', %(text)s, %(text)s, '', 'copy', 5, '[]', %(text)s);
INSERT INTO outbox_message (message_id, destination, key, body, lane, headers, error, attempts, held, due_at)
VALUES (%(text)s, %(text)s, %(text)s, '', 0, '{}', %(text)s, 1, true, now() + interval '1 h');
INSERT INTO outbox_relay (relay_id, host, pid, started_at, seen_at, outages)
VALUES ('r', %(text)s, 1, now(), now(), jsonb_build_object(%(text)s::text, %(text)s::text));
INSERT INTO worker_report (worker_id, subscriber_id, host, pid, source, version, state)
VALUES ('w', %(text)s, %(text)s, 1, %(text)s, '1', 'working')
"""
"""A hostile text wherever a table takes one."""


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


def park(
    engine: Engine, message_id: str, error: str = "ValueError: no", subscriber_id: str = "billing",
    headers: Mapping[str, str] | None = None,
) -> int:  # fmt: skip
    with engine.begin() as connection:
        letter = DeadLetter(
            subscriber_id=subscriber_id, message_id=message_id, reason=Reason.FAILED, error=error, attempts=3,
            source="memory", body=f"{{}}{error}".encode(), headers=headers or {}, envelope={},
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
            wrong += [f"{path} on a phone: {word} is broken" for word in page.evaluate(BROKEN)]
            page.set_viewport_size({"width": 1280, "height": 800})
    assert wrong + tab.troubles == []


def test_every_page_of_an_empty_database_loads_without_a_fault(tab: Tab) -> None:
    wrong = []
    for path in paths({}):
        page = tab.go(path)
        wrong += [f"{path}: {one}" for one in audit_of(page)]
        page.emulate_media(color_scheme="dark")
        page.set_viewport_size({"width": 390, "height": 800})
        wrong += [f"{path} dark, on a phone: {one}" for one in audit_of(page, "color-contrast")]
        wrong += [f"{path} on a phone: {width} pixels too wide"] if (width := width_beyond(page)) > 0 else []
        page.emulate_media(color_scheme="light")
        page.set_viewport_size({"width": 1280, "height": 800})
    # A letter, a message or a load that is not there is answered with 404, as it should be.
    assert wrong + [one for one in tab.troubles if "404" not in one] == []


def test_what_messages_hold_is_text_on_every_page(
    open_tab: Callable[..., Tab], serve: Callable[..., str], engine: Engine
) -> None:
    number = park(engine, HOSTILE, HOSTILE, HOSTILE, {HOSTILE: HOSTILE})
    _spread(engine)
    which = LetterFilter(message_ids=(HOSTILE,))
    assert LetterOperations(engine).select(which, OperationKind.REDRIVE, by=HOSTILE, note=HOSTILE)
    named = urlencode({"id": HOSTILE})
    paths = (
        "/", f"/subscriber?{named}", f"/message?{named}", "/letters", f"/letter?number={number}",
        f"/letters/confirm?action=discard&numbers={number}", "/outbox", "/leases", "/loads?run=r1", "/maintenance",
    )  # fmt: skip
    tab = open_tab(serve(allow_actions=True, token=TOKEN, show_bodies=True, send=lambda _letter: None))
    sign_in(tab, name=HOSTILE)
    page, wrong = tab.page, []
    for path in paths:
        tab.go(path)
        expect(page.locator("#live")).to_contain_text(HOSTILE.split("\n")[0])
        wrong += [f"{path}: {one}" for one in page.evaluate(TURNED, [HOSTILE, MARKS])]
        wrong += [f"{path}: an element of theirs"] * page.locator("main img, main script").count()
        wrong += [f"{path}: a script ran"] * (page.evaluate("globalThis.ran") is not None)
        for width in (1280, 390):
            page.set_viewport_size({"width": width, "height": 800})
            wrong += [f"{path}, {width} wide: {beyond} too wide"] if (beyond := width_beyond(page)) > 0 else []
    page.set_viewport_size({"width": 1280, "height": 800})
    tab.go("/").locator("tbody a", has_text="gnissecorp").first.click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("gnissecorp")
    expect(page.locator("txbox-chart .u-legend")).to_contain_text("processed")
    page.get_by_label("Message id").fill("<b>'\"")
    page.get_by_role("button", name="Find").click()
    expect(page.locator("#live code")).to_have_text("<b>'\"")
    assert wrong + tab.troubles == []


def _spread(engine: Engine) -> None:
    """Put the hostile text wherever a table takes one."""
    pause(engine, subscriber_id=HOSTILE, by=HOSTILE, note=HOSTILE)
    pause(engine, destination=HOSTILE, by=HOSTILE, note=HOSTILE)
    with engine.begin() as connection:
        note_action(connection, "pause", HOSTILE, by=HOSTILE, detail={"note": HOSTILE, HOSTILE: "1"})
    for statement in SPREAD.split(";"):
        with engine.begin() as connection:
            connection.exec_driver_sql(statement, {"text": HOSTILE})


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
    assert tab.troubles == []


def test_a_page_whose_updates_are_stopped_asks_for_nothing(tab: Tab) -> None:
    page, asked = tab.page, list[str]()
    page.clock.install()
    page.on("request", lambda one: asked.append(one.url))
    tab.go("/letters")
    with page.expect_response("**/letters"):
        page.clock.run_for(PACE_MS)
    page.get_by_role("button", name="Stop updates").click()
    asked.clear()
    page.clock.run_for(10 * PACE_MS)
    page.evaluate("fetch('/static/icon.svg').then(answer => answer.text())")  # what was asked before is heard before
    assert [url.rpartition("/")[2] for url in asked] == ["icon.svg"]
    with page.expect_response("**/letters"):
        page.get_by_role("button", name="Update again").click()
        page.clock.run_for(PACE_MS)
    assert tab.troubles == []


def test_a_phone_shows_letters_first_and_their_filter_when_asked(open_tab: Callable[..., Tab], engine: Engine) -> None:
    park(engine, "a")
    tab = open_tab(width=390)
    page = tab.go("/letters")
    field = page.get_by_label("Subscriber")
    expect(field).to_be_hidden()
    assert (page.get_by_role("link", name="a", exact=True).bounding_box() or {"y": 999})["y"] < 800
    page.get_by_text("Filter", exact=True).first.click()
    expect(field).to_be_visible()
    assert audit_of(page) == []
    page.set_viewport_size({"width": 1280, "height": 800})
    expect(field).to_be_visible()
    assert tab.troubles == []


def test_a_session_that_has_ended_does_nothing_and_asks_who_it_is(acting: Tab, engine: Engine) -> None:
    number = park(engine, "a")
    page = acting.go(f"/letters/confirm?action=discard&numbers={number}")
    page.get_by_label("Why").fill("tests")
    page.context.clear_cookies()
    page.get_by_role("button", name="Discard").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")
    sign_in(acting)
    acting.go("/letters")
    expect(page.get_by_label(f"Choose letter {number}")).to_be_visible()
    expect(page.locator("#live")).to_contain_text("None yet.")
    assert acting.troubles == []


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
    said = banner.inner_text()
    expect(page.locator("#live")).to_contain_text("kept")
    with page.expect_response("**/letters"):  # another one fails, and what is shown is still from then
        pass
    expect(banner).to_have_text(said)
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
    tab.go("/letters?subscriber=a")
    fill_in(page)
    expect(page.get_by_role("heading", level=1)).to_have_text("Dead letters")
    expect(page.get_by_label("Subscriber")).to_have_value("a")
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
        assert page.evaluate(OUTLINED), reached[-1]
    pages = [place.title for place in PLACES if place.in_navigation]
    assert reached[:1] == ["To the content"]
    assert reached[1 : 2 + len(pages)] == ["txbox", *pages]
    assert reached[2 + len(pages) : 5 + len(pages)] == ["find-id", "Find", "Stop updates"]
    assert "billing" in reached
    tab.go("/")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#live")).to_be_focused()


def test_letters_are_redriven_by_keys_alone(acting: Tab, engine: Engine) -> None:
    park(engine, "a")
    page = acting.go("/letters")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # to the content
    _press_to(page, "activeElement.name === 'number'")
    page.keyboard.press("Space")
    _press_to(page, "activeElement.innerText.startsWith('Redrive the chosen')", "Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_contain_text("1 letter would be sent through again")
    _press_to(page, "activeElement.id === 'why'")
    page.keyboard.type("the card service is back")
    _press_to(page, "activeElement.innerText === 'Redrive'")
    page.keyboard.press("Enter")
    expect(page.get_by_role("region", name="Redrives and discards").locator("tbody tr")).to_contain_text("finished")
    assert acting.troubles == []


def _press_to(page: Page, condition: str, key: str = "Tab") -> None:
    """Press a key until what has the focus is what is meant; it is always seen."""
    for _ in range(40):
        page.keyboard.press(key)
        assert page.evaluate(OUTLINED), page.evaluate("document.activeElement.outerHTML")
        if page.evaluate(f"document.{condition}"):
            return
    raise AssertionError(f"the keyboard does not reach it: {condition}")
