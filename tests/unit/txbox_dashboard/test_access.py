"""Sessions, and where a request comes from."""

import time

import pytest

from txbox_dashboard import access
from txbox_dashboard.access import Sessions, is_same_site

TOKEN = "correct horse battery staple"


def test_a_cookie_is_read_by_every_process_that_has_the_token_and_by_no_other() -> None:
    first, second = (Sessions(TOKEN).read(Sessions(TOKEN).cookie("anna")) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.name == second.name == "anna"
    assert first.forgery_token != second.forgery_token
    assert Sessions(TOKEN).read(Sessions(f"{TOKEN}!").cookie("anna")) is None


@pytest.mark.parametrize("cookie", [None, "", ".", "a.b", "a.b.c", "é.é", "e30=.", "AAAA.AAAA"])
def test_what_is_no_cookie_of_ours_is_no_session(cookie: str | None) -> None:
    assert Sessions(TOKEN).read(cookie) is None


def test_a_changed_cookie_is_no_session() -> None:
    text, signature = Sessions(TOKEN).cookie("anna").split(".")
    other = Sessions(TOKEN).cookie("root").split(".")[0]
    assert other != text
    assert Sessions(TOKEN).read(f"{other}.{signature}") is None


def test_a_session_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "SESSION_SECONDS", -1)
    assert Sessions(TOKEN).read(Sessions(TOKEN).cookie("anna")) is None


def test_a_session_that_was_signed_out_is_read_no_more_and_others_are() -> None:
    sessions = Sessions(TOKEN)
    ended, other = sessions.cookie("anna"), sessions.cookie("anna")
    sessions.end(ended)
    sessions.end(ended)
    for nothing in (None, "", "a.b"):
        sessions.end(nothing)
    assert sessions.read(ended) is None
    assert sessions.read(other) is not None


def test_sessions_that_were_signed_out_take_a_bounded_memory_and_none_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(access, "ENDED_SESSIONS", 3)
    sessions = Sessions(TOKEN)
    cookies = []
    for seconds in range(8):
        monkeypatch.setattr(access, "SESSION_SECONDS", 1000 + seconds)
        cookies.append(sessions.cookie("anna"))
    for cookie in (cookies[6], *cookies[:6]):
        sessions.end(cookie)
    assert [sessions.read(cookie) for cookie in cookies[:7]] == [None] * 7
    assert sessions.read(cookies[7]) is not None
    assert len(sessions._ended) <= 3


def test_a_session_that_was_signed_out_does_not_come_back_with_a_clock_that_is_set_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = time.time()
    sessions = Sessions(TOKEN)
    ended = sessions.cookie("anna")
    sessions.end(ended)
    with monkeypatch.context() as ahead:
        ahead.setattr(time, "time", lambda: now + 2 * access.SESSION_SECONDS)
        sessions.end(sessions.cookie("ben"))
        assert len(sessions._ended) == 1, "what has run out is not remembered"
    assert sessions.read(ended) is None


@pytest.mark.parametrize(("token", "admitted"), [(TOKEN, True), ("", False), (f"{TOKEN} ", False), ("é", False)])
def test_the_token_alone_is_admitted(token: str, *, admitted: bool) -> None:
    assert Sessions(TOKEN).admits(token) is admitted


@pytest.mark.parametrize(
    ("headers", "same"),
    [
        ({"sec-fetch-site": "same-origin"}, True),
        ({"sec-fetch-site": "cross-site"}, False),
        ({"sec-fetch-site": "same-site"}, False),
        ({"sec-fetch-site": "none"}, False),
        ({"origin": "http://127.0.0.1:8790", "host": "127.0.0.1:8790"}, True),
        ({"origin": "http://127.0.0.1:1", "host": "127.0.0.1:8790"}, False),
        ({"origin": "null", "host": "127.0.0.1:8790"}, False),
        ({"host": "127.0.0.1:8790"}, True),
    ],
)
def test_a_request_that_changes_something_comes_from_a_page_of_this_site(
    headers: dict[str, str], *, same: bool
) -> None:
    assert is_same_site(headers) is same
