"""Who may see pages, what every answer carries, and what is shown where the database cannot be used."""

import re
from collections.abc import Callable
from html import unescape
from urllib.parse import urlencode

import pytest
from sqlalchemy import Engine, create_engine
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from support.postgres.statements import run
from txbox import Inbox, InvalidConfiguration
from txbox_dashboard import dashboard
from txbox_dashboard.access import COOKIE
from txbox_dashboard.app import PLACES

from .conftest import TOKEN

Open = Callable[..., TestClient]


def test_every_page_shows_an_empty_database_without_scripts_or_styles_within_it(pages: TestClient) -> None:
    for place in PLACES:
        answer = pages.get(place.path)
        assert answer.status_code == (404 if place.path == "/letter" else 200), answer.text
        assert "Some of it is missing" not in answer.text, place.path
        assert not re.search(r"<style|\sstyle=|<script(?![^>]*\ssrc=)|\son\w+=", answer.text), "it has none within it"
        live = pages.get(place.path, headers={"HX-Request": "true"}).text  # a refresh brings its live part alone
        assert live.lstrip().startswith('<div id="live"'), place.path
        assert "<header" not in live, place.path


def test_every_answer_forbids_scripts_and_frames_that_are_not_ours(pages: TestClient) -> None:
    for path in ("/", "/none-such", "/static/site.js", "/sign-in"):
        headers = pages.get(path).headers
        assert "default-src 'none'; script-src 'self'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"


def test_a_hostile_name_is_data(pages: TestClient, engine: Engine) -> None:
    hostile = "\"><script>alert('x')</script>{{7*7}}\n&"
    with engine.begin() as connection:
        Inbox(hostile).record(connection, "1")
    text = pages.get("/").text
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;{{7*7}}" in text


def test_a_name_of_the_host_that_is_not_ours_is_refused(open_dashboard: Open) -> None:
    pages = open_dashboard(allowed_hosts=["localhost", "127.0.0.1", "::1"])
    assert pages.get("/").status_code == 200
    assert pages.get("/", headers={"Host": "[::1]:8790"}).status_code == 200
    for host in ("evil.example", "127.0.0.1.evil.example:8790", "", "[", "127.0.0.1@evil.example"):
        assert pages.get("/", headers={"Host": host}).status_code == 421


def test_with_a_token_every_page_and_action_takes_a_session(open_dashboard: Open) -> None:
    pages = open_dashboard(token=TOKEN)
    for place in PLACES:
        assert pages.get(place.path).headers["location"] == f"/sign-in?{urlencode({'next': place.path})}"
    assert pages.get("/", headers={"HX-Request": "true"}).headers["hx-redirect"] == "/sign-in?next=%2F"
    assert pages.get("/sign-in").status_code == 200
    assert pages.post("/sign-in", data={"name": "anna", "token": "wrong"}).status_code == 403
    assert pages.post("/sign-in", data={"name": " ", "token": TOKEN}).status_code == 400
    answer = pages.post("/sign-in", data={"name": "anna", "token": TOKEN})
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert pages.get("/").status_code == 200
    pages.post("/sign-out")
    assert pages.get("/").status_code == 303


@pytest.mark.parametrize("root", ["", "/txbox"])
def test_who_has_signed_in_is_where_they_were_and_never_elsewhere(engine: Engine, root: str) -> None:
    app = Starlette(routes=[Mount(root, dashboard(engine, token=TOKEN))])
    with TestClient(app, follow_redirects=False) as pages:
        asked = pages.get(f"{root}/letters?error=a%26b%0A%22&all=yes").headers["location"]
        [kept] = re.findall('name="next" value="([^"]*)"', pages.get(asked).text)
        form = {"name": "anna", "token": TOKEN, "next": unescape(kept)}
        assert kept in pages.post(f"{root}/sign-in", data=form | {"token": "wrong"}).text
        answer = pages.post(f"{root}/sign-in", data=form)
        assert answer.headers["location"] == f"{root}/letters?error=a%26b%0A%22&all=yes"
        for evil in (
            "", "//evil.example", "/\\evil.example", "\\\\evil.example", "/\t/evil.example", "/sign-in",
            "http:letters", "http://evil.example/letters", "/letters/../..//evil", "@evil.example", ".evil.example",
        ):  # fmt: skip
            answer = pages.post(f"{root}/sign-in", data=form | {"next": evil})
            assert answer.headers["location"] == f"{root}/", evil


def test_another_site_signs_nobody_in_or_out(open_dashboard: Open) -> None:
    pages = open_dashboard(token=TOKEN)
    other = {"Sec-Fetch-Site": "cross-site"}
    assert pages.post("/sign-in", data={"name": "a", "token": TOKEN}, headers=other).status_code == 403
    pages.post("/sign-in", data={"name": "anna", "token": TOKEN})
    pages.post("/sign-out", headers=other)
    assert pages.get("/").status_code == 200


def test_a_copied_cookie_is_refused_after_its_person_has_signed_out(open_dashboard: Open) -> None:
    pages = open_dashboard(token=TOKEN)
    pages.post("/sign-in", data={"name": "anna", "token": TOKEN})
    copied = {"Cookie": f"{COOKIE}={pages.cookies[COOKIE]}"}
    pages.cookies.clear()
    assert pages.get("/", headers=copied).status_code == 200
    pages.post("/sign-out", headers=copied | {"Sec-Fetch-Site": "cross-site"})
    assert pages.get("/", headers=copied).status_code == 200
    pages.post("/sign-out", headers=copied)
    assert pages.get("/", headers=copied).headers["location"] == "/sign-in?next=%2F"
    pages.post("/sign-in", data={"name": "anna", "token": TOKEN})
    assert pages.get("/").status_code == 200


def test_a_loop_of_guesses_is_throttled_and_not_answered(open_dashboard: Open) -> None:
    pages = open_dashboard(token=TOKEN)
    guesses = [pages.post("/sign-in", data={"name": "eve", "token": str(guess)}) for guess in range(30)]
    assert [answer.status_code for answer in guesses] == [403] * 10 + [429] * 20
    assert 0 < int(guesses[-1].headers["retry-after"]) <= 300
    assert "Too many wrong tokens" in guesses[-1].text
    assert pages.post("/sign-in", data={"name": "eve", "token": TOKEN}).status_code == 429  # nor if it is right


def test_people_who_sign_in_are_no_guessers(open_dashboard: Open) -> None:
    pages = open_dashboard(token=TOKEN)
    for _ in range(30):
        assert pages.post("/sign-in", data={"name": "anna", "token": TOKEN}).status_code == 303
        assert pages.post("/sign-in", data={"name": " ", "token": TOKEN}).status_code == 400
        other_site = {"Sec-Fetch-Site": "cross-site"}
        assert pages.post("/sign-in", data={"name": "a", "token": "b"}, headers=other_site).status_code == 403
    assert pages.post("/sign-in", data={"name": "anna", "token": "wrong"}).status_code == 403


def test_a_cookie_that_came_over_tls_never_goes_without_it(open_dashboard: Open) -> None:
    pages = open_dashboard(token=TOKEN)
    form = {"name": "anna", "token": TOKEN}
    answer = pages.post("https://127.0.0.1:8790/sign-in", data=form)
    assert "; secure" in answer.headers["set-cookie"].lower()
    assert "; secure" not in pages.post("/sign-in", data=form).headers["set-cookie"].lower()


def test_a_host_that_knows_its_users_says_who_it_is(open_dashboard: Open) -> None:
    pages = open_dashboard(identify=lambda request: request.headers.get("x-user"), allow_actions=True)
    assert pages.get("/").status_code == 403
    assert pages.get("/", headers={"X-User": "anna"}).status_code == 200


def test_settings_that_cannot_work_are_refused(engine: Engine) -> None:
    with pytest.raises(InvalidConfiguration, match="takes a token"):
        dashboard(engine, allow_actions=True)
    with pytest.raises(InvalidConfiguration, match="at least 16 characters"):
        dashboard(engine, token="short")


def test_mounted_in_an_application_all_links_are_below_it(engine: Engine) -> None:
    app = Starlette(routes=[Mount("/txbox", dashboard(engine))])
    with TestClient(app) as client:
        text = client.get("/txbox/").text
        links = re.findall(r'(?:href|src|action|hx-get)="([^"]*)"', text)
        assert links
        assert all(link.startswith("/txbox/") or link == "#live" for link in links)
        assert client.get("/txbox/static/site.css").status_code == 200


def test_a_database_that_is_away_is_said_without_its_password() -> None:
    engine = create_engine("postgresql+psycopg://anna:secret@127.0.0.1:1/none", connect_args={"connect_timeout": 2})
    with TestClient(dashboard(engine)) as pages:
        answer = pages.get("/")
    assert answer.status_code == 503
    assert "The database cannot be used" in answer.text
    assert "secret" not in answer.text


def test_tables_that_are_missing_are_said_with_the_remedy(database_url: str) -> None:
    engine = create_engine(database_url)
    with TestClient(dashboard(engine, schema="none_such")) as pages:
        answer = pages.get("/")
    assert answer.status_code == 503
    assert "txbox db upgrade" in answer.text
    engine.dispose()


@pytest.mark.parametrize("change", ["RENAME TO gone", "RENAME COLUMN run_id TO gone"])
def test_tables_of_another_version_are_said_with_the_remedy(change: str, pages: TestClient, engine: Engine) -> None:
    run(engine, f"ALTER TABLE bulk_load {change}")
    answer = pages.get("/loads")
    assert answer.status_code == 503
    assert "does not exist; `txbox db upgrade`" in answer.text


def test_what_is_locked_is_left_out_and_the_rest_is_shown(pages: TestClient, engine: Engine) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("LOCK TABLE worker_report")
        answer = pages.get("/")
    assert answer.status_code == 200
    assert "the workers: another session has locked the table" in answer.text
