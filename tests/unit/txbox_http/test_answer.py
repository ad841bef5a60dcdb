"""Answers and problems: what is kept of them, what a repeat gets, and where problems are explained."""

import re
from pathlib import Path

from txbox_http.answer import Answer, decoded, encoded
from txbox_http.problems import _KINDS

SENT = Answer(
    201,
    (
        (b"content-type", b"text/plain"),
        (b"content-length", b"3"),
        (b"x-name", b"\xe9"),
        (b"link", b"<a>"),
        (b"link", b"<b>"),
        (b"set-cookie", b"session=secret"),
        (b"date", b"Mon, 01 Jan 2024 00:00:00 GMT"),
        (b"transfer-encoding", b"chunked"),
    ),
    b"a\0\xff",
)


def test_a_repeat_gets_what_is_of_the_answer_and_not_of_its_connection_or_session() -> None:
    again = decoded(encoded(SENT)).replayed()
    assert (again.status, again.body) == (SENT.status, SENT.body)
    assert again.headers == (
        (b"content-type", b"text/plain"),
        (b"x-name", b"\xe9"),
        (b"link", b"<a>"),
        (b"link", b"<b>"),
        (b"content-length", b"3"),
        (b"idempotent-replayed", b"true"),
    )


def test_an_answer_without_a_body_gets_no_length() -> None:
    assert Answer(204, (), b"").replayed().headers == ((b"idempotent-replayed", b"true"),)


PAGE = Path(__file__).parents[3] / "docs" / "http.md"


def test_the_page_has_the_type_of_each_problem_with_its_status() -> None:
    rows = re.findall(r"\| (\d{3})\b[^|]*\| `#([a-z-]+)` \|", PAGE.read_text())
    assert sorted(rows) == sorted((str(status), kind) for kind, (status, _) in _KINDS.items())
