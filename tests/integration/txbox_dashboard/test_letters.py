"""Dead letters: found in bounded time, shown as far as it is allowed, redriven and discarded on record."""

import re
from collections.abc import Callable
from html import unescape
from typing import Any

import pytest
from sqlalchemy import Engine
from starlette.testclient import TestClient

from support.postgres.statements import bytes_fetched, run
from support.waiting import wait_until
from txbox import DeadLetter, DeadLetters, Failures, Inbox, Reason
from txbox.dead_letters import LetterOperations
from txbox.operations.actions import read_actions
from txbox.operations.pauses import read_pauses
from txbox.outbox.outbox import RELAY_SUBSCRIBER
from txbox_dashboard import Sensitive, reader
from txbox_dashboard.app import ACTIONS
from txbox_dashboard.pages import letter_finder as finder
from txbox_dashboard.pages.letter_finder import FIELDS, NEWEST
from txbox_dashboard.pages.letters import BODY_BYTES
from txbox_dashboard.reader import Reader
from txbox_dashboard.redaction import SHOWN_CHARACTERS

from .conftest import TOKEN
from .test_pages import text_of

Open = Callable[..., TestClient]


def park(engine: Engine, *message_ids: str, **values: Any) -> list[int]:
    """Park messages, and return the numbers of their letters."""
    given = {"subscriber_id": "billing", "reason": Reason.FAILED, "error": "ValueError: no", "attempts": 3}
    given |= {"source": "memory", "body": b'{"customer": 7}', "headers": {"tenant": "x"}, "envelope": {}} | values
    numbers = []
    for message_id in message_ids:
        with engine.begin() as connection:
            letter = DeadLetter(message_id=message_id, **given)
            numbers.append(DeadLetters(engine).park_in(connection, letter))
    return numbers


def form(acting: TestClient, **fields: str) -> dict[str, str]:
    """The fields of a form of this session."""
    token = re.search(r'name="forgery_token" value="([^"]+)"', acting.get("/subscriber?id=billing").text)
    assert token
    return {"forgery_token": token[1], "up_to": "999999", **fields}


def finished(acting: TestClient, engine: Engine) -> Any:
    return wait_until(lambda: [one for one in LetterOperations(engine).list() if one.finished_at is not None])[0]


def test_filters_suggest_what_letters_hold(pages: TestClient, engine: Engine) -> None:
    park(engine, "a", "b", source='<q> "1"')
    park(engine, "c", subscriber_id=f"{RELAY_SUBSCRIBER}:orders:new")
    text = pages.get("/letters").text
    suggested = {"subscriber": ["billing"], "destination": ["orders:new"], "source": ['<q> "1"', "memory"]}
    for field, values in suggested.items():
        listed = re.search(f'list="s-{field}".*<datalist id="s-{field}">(.*?)</datalist>', text, re.DOTALL)
        assert listed, field
        assert [unescape(one) for one in re.findall('<option value="([^"]*)">', listed[1])] == values


def test_letters_are_found_by_each_part_of_the_filter(pages: TestClient, engine: Engine) -> None:
    (one,) = park(engine, "a-1", error="ValueError: <b>card</b>", headers={"tenant": "north"}, source="queue-1")
    (two,) = park(engine, "b-2", subscriber_id="mailing", reason=Reason.CRASHED)
    run(engine, "UPDATE dead_letter SET parked_at = now() - interval '2 days' WHERE dead_letter_id = %s", (two,))
    for query, expected in {
        "": {one, two},
        "subscriber=billing": {one},
        "reason=crashed": {two},
        "error=CARD": {one},
        "source=queue-1": {one},
        "message=b-2": {two},
        "since=2020-01-01T00:00&until=2020-01-02T00:00": set(),
        "numbers=" + str(two): {two},
        "destination=own:x": set(),
    }.items():
        found = re.findall(r'<th scope="row"><a href="/letter\?number=(\d+)"', pages.get(f"/letters?{query}").text)
        assert set(map(int, found)) == expected, query
    for query in ("reason=none", "since=soon", "numbers=1,x", "subscriber=a&destination=b"):
        answer = pages.get(f"/letters?{query}")
        assert answer.status_code == 200
        assert 'class="problem"' in answer.text


def test_a_filter_that_means_few_goes_on_from_where_it_had_to_end(
    pages: TestClient, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finder, "STRETCH", 10)
    monkeypatch.setattr(finder, "SEARCH_SECONDS", 0.0)
    first, *_ = park(engine, "wanted", *(f"m{number}" for number in range(35)))
    path, looks, numbers = "/letters?message=wanted", 0, []
    while path and looks < 10:
        text = pages.get(path).text
        numbers += re.findall(r'<th scope="row"><a href="/letter\?number=(\d+)"', text)
        older = re.search(r'href="(/letters\?[^"]*before=\d+[^"]*)"', text)
        path, looks = (older[1].replace("&amp;", "&") if older else ""), looks + 1
    assert numbers == [str(first)]
    assert looks == 4


def test_a_letter_is_shown_without_its_body_unless_asked_and_then_redacted(
    open_dashboard: Open, engine: Engine
) -> None:
    (number,) = park(engine, "a", body=b'{"card": "4111"}', headers={"secret": "hush"}, error="4111 declined")
    shown = text_of(open_dashboard(), f"/letter?number={number}")
    assert "4111 declined" in shown
    assert "hush" not in shown
    assert '"card"' not in shown
    seen: list[Sensitive] = []

    def redact(what: Sensitive) -> str:
        seen.append(what)
        return what.text.replace("4111", "****")

    shown = text_of(open_dashboard(show_bodies=True, redact=redact), f"/letter?number={number}")
    assert '"card": "****"' in shown
    assert "**** declined" in shown
    assert "4111" not in shown
    assert {(one.kind, one.header) for one in seen} >= {("body", None), ("header", "secret"), ("error", None)}

    def broken(_: Sensitive) -> str:
        raise KeyError("4111")

    shown = text_of(open_dashboard(show_bodies=True, redact=broken), f"/letter?number={number}")
    assert "4111" not in shown
    assert "not shown: redact raised KeyError" in shown


@pytest.mark.parametrize("body", [b"", b"\xff\0\x01" * 400, b"[" * 30_000, b"x" * 100_000, "\u202e<b>".encode()])
def test_any_body_is_shown_as_text(open_dashboard: Open, engine: Engine, body: bytes) -> None:
    (number,) = park(engine, "a", body=body)
    assert open_dashboard(show_bodies=True).get(f"/letter?number={number}").status_code == 200


@pytest.mark.parametrize(("show_bodies", "most"), [(True, 2 * BODY_BYTES + 2000), (False, 2000)])
def test_of_a_letter_of_50_mb_no_more_is_read_than_is_shown(
    open_dashboard: Open, engine: Engine, *, show_bodies: bool, most: int
) -> None:
    (number,) = park(engine, "a", body=b"x" * 50_000_000)
    pages = open_dashboard(show_bodies=show_bodies)
    with bytes_fetched(engine) as fetched:
        text = text_of(pages, f"/letter?number={number}")
    assert sum(fetched) < most, sum(fetched)
    assert "Size 50 MB" in text
    assert ("x" * SHOWN_CHARACTERS + "… (50,000,000 bytes in all)" in text) is show_bodies
    assert "x" * (SHOWN_CHARACTERS + 1) not in text


@pytest.mark.parametrize("character", ["é", "😀"])
def test_a_body_that_is_read_in_part_is_not_cut_within_a_character(
    open_dashboard: Open, engine: Engine, monkeypatch: pytest.MonkeyPatch, character: str
) -> None:
    monkeypatch.setattr("txbox_dashboard.pages.letters.BODY_BYTES", 1001)
    (number,) = park(engine, "a", body=(character * 1000).encode() + b"...")
    text = text_of(open_dashboard(show_bodies=True), f"/letter?number={number}")
    assert f"{character}… ({len(character.encode()) * 1000 + 3:,} bytes in all)" in text


READ = {
    "/letters": (*FIELDS, "before"),
    "/letters/confirm": (*FIELDS, "action"),
    "/letter": ("number",),
    "/message": ("id",),
    "/subscriber": ("id", "hours"),
    "/loads": ("run",),
}
"""What each page reads of its URL."""


@pytest.mark.parametrize(
    "hostile", ["%", "%(x)s", "'; --", "\0", "\ud800", "😀" * 300, "x" * 5000, "{{7*7}}", "<script>"]
)
def test_hostile_filters_and_ids_are_data(pages: TestClient, hostile: str) -> None:
    for path, names in READ.items():
        for name in names:
            answer = pages.get(path, params={name: hostile.encode("utf-8", "surrogatepass")})
            assert answer.status_code in (200, 400, 404), (path, name)
            assert "<script>" not in answer.text


def test_what_is_chosen_is_confirmed_redriven_and_on_record(open_acting: Open, engine: Engine) -> None:
    sent: list[str] = []
    acting = open_acting(send=lambda letter: sent.append(letter.message_id))
    one, two, _three = park(engine, "a", "b", "c")
    confirm = text_of(acting, f"/letters/confirm?chosen=yes&number={one}&number={two}&action=redrive")
    assert "2 letters would be sent through again" in confirm
    fields = form(acting, numbers=f"{one},{two}", note="repaired")
    for _ in range(2):  # the same form, sent twice: in another tab, or by an impatient hand
        assert acting.post("/letters/redrive", data=fields).status_code == 303
    wait_until(lambda: len([op for op in LetterOperations(engine).list() if op.finished_at]) == 2)
    assert sent == ["a", "b"]
    first, again = sorted(LetterOperations(engine).list(), key=lambda op: op.operation_id)
    assert (first.requested_by, first.note, dict(first.outcomes)) == ("anna", "repaired", {"redriven": 2})
    assert dict(again.outcomes) == {"gone": 2}
    text = text_of(acting, "/letters")
    assert "2 redriven finished" in text
    assert "redriven" in text_of(acting, f"/letter?number={one}")
    assert "by anna" in text_of(acting, f"/letter?number={one}")


def test_all_of_a_filter_is_discarded_with_a_reason(acting: TestClient, engine: Engine) -> None:
    park(engine, "a", "b")
    park(engine, "c", subscriber_id="mailing")
    answer = acting.post("/letters/discard", data=form(acting, subscriber="billing"))
    assert answer.status_code == 400
    assert "takes a note" in answer.text
    acting.post("/letters/discard", data=form(acting, subscriber="billing", note="tests"))
    assert dict(finished(acting, engine).outcomes) == {"discarded": 2}
    assert [letter.message_id for letter in DeadLetters(engine).list()] == ["c"]


def test_what_is_parked_after_the_count_is_not_discarded(acting: TestClient, engine: Engine) -> None:
    park(engine, "a")
    confirm = acting.get("/letters/confirm?action=discard&subscriber=billing").text
    assert "<strong>1</strong> letter" in confirm
    park(engine, "b")
    fields = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', confirm))
    assert acting.post("/letters/discard", data={**fields, "note": "tests"}).status_code == 303
    assert dict(finished(acting, engine).outcomes) == {"discarded": 1}
    assert [letter.message_id for letter in DeadLetters(engine).list()] == ["b"]
    without = {name: value for name, value in fields.items() if name != "up_to"}
    assert acting.post("/letters/discard", data={**without, "note": "tests"}).status_code == 400


def test_chosen_letters_are_counted_by_their_numbers_however_old(
    acting: TestClient, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finder, "STRETCH", 2)
    monkeypatch.setattr(finder, "SEARCH_SECONDS", 0.0)
    old, *_, done = park(engine, "old", *(f"m{number}" for number in range(9)), "done")
    run(engine, "UPDATE dead_letter SET discarded_at = now() WHERE dead_letter_id = %s", (done,))
    text = text_of(acting, f"/letters/confirm?chosen=yes&number={old}&number={done}&action=discard")
    assert "1 letter would be given up" in text
    found = acting.get(f"/letters?numbers={old},{done}").text
    assert re.findall(r'<a href="/letter\?number=(\d+)"', found) == [str(done), str(old)]


def test_what_is_not_read_in_time_is_not_taken_for_nothing(
    acting: TestClient, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    park(engine, "a", "b", "c")
    rows = Reader.rows

    def slow(self: Reader, what: str, statement: str, parameters: Any = None) -> Any:
        if "GROUP BY 1, 2" in statement or "LIMIT %(page)s" in statement:
            return rows(self, what, "SELECT pg_sleep(60)")
        return rows(self, what, statement, parameters)

    monkeypatch.setattr(Reader, "rows", slow)
    monkeypatch.setattr(reader, "STATEMENT_MILLISECONDS", 20)
    text = acting.get("/letters/confirm?action=discard").text
    assert "None of these letters waits" not in text
    assert "not all could be counted" in text
    text = acting.get("/letters").text
    assert "Not read: see above." in text
    assert "No message is parked" not in text
    assert str(NEWEST) not in text
    assert "before=2" in acting.get("/letters?before=2").text  # the next look begins where this one could not


def test_letters_that_were_not_looked_at_are_not_taken_for_none(
    pages: TestClient, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, *done = park(engine, *(f"m{number}" for number in range(5)))
    run(engine, "UPDATE dead_letter SET discarded_at = now() WHERE dead_letter_id = ANY(%s)", (done,))
    monkeypatch.setattr(finder, "STRETCH", 2)
    monkeypatch.setattr(finder, "SEARCH_SECONDS", 0.0)
    for path in ("/letters", f"/letters?before={waits}", "/letters?reason=none"):
        assert "No message is parked" not in text_of(pages, path)
        assert "No letter of this filter" not in text_of(pages, path)
    assert "None among those that were looked at." in text_of(pages, "/letters")


def test_a_letter_says_whether_others_wait_behind_it(pages: TestClient, engine: Engine) -> None:
    (number,) = park(engine, "a", order_key="k")
    run(engine, "UPDATE dead_letter SET order_position = 3")
    waits = "Key k, place 3: what comes after it waits until this message is processed or discarded"
    assert waits in text_of(pages, f"/letter?number={number}")
    run(engine, "UPDATE dead_letter SET redriven_at = now()")  # it is on its way, and holds its key
    assert waits in text_of(pages, f"/letter?number={number}")
    run(engine, "UPDATE dead_letter SET discarded_at = now()")
    assert "Key k Body" in text_of(pages, f"/letter?number={number}").replace("Attempts that counted", "Body")


def test_an_operation_that_this_dashboard_does_not_carry_out_is_not_stopped(acting: TestClient, engine: Engine) -> None:
    park(engine, "a")
    acting.post("/letters/discard", data=form(acting, note="tests"))
    operation = finished(acting, engine)
    wait_until(lambda: "running" not in text_of(acting, "/letters"))
    answer = acting.post("/operations/stop", data=form(acting, operation=str(operation.operation_id)))
    assert answer.status_code == 400
    with engine.connect() as connection:
        assert read_actions(connection) == ()


def test_nothing_chosen_is_not_all(acting: TestClient, engine: Engine) -> None:
    park(engine, "a")
    answer = acting.get("/letters/confirm?chosen=yes&action=discard")
    assert answer.status_code == 400
    assert "No letter was chosen" in answer.text
    assert acting.post("/letters/redrive", data=form(acting, numbers=",")).status_code == 400
    assert len(DeadLetters(engine).list()) == 1


def test_what_cannot_be_sent_is_said_and_can_be_tried_again(open_acting: Open, engine: Engine) -> None:
    broken = [True]

    def send(_letter: DeadLetter) -> None:
        if broken:
            raise OSError("the queue is away")

    acting = open_acting(send=send)
    park(engine, "a")
    acting.post("/letters/redrive", data=form(acting))
    wait_until(lambda: "not finished" in text_of(acting, "/letters"))
    (operation,) = LetterOperations(engine).list()
    assert dict(operation.outcomes) == {"failed": 1}
    broken.clear()
    acting.post("/operations/resume", data=form(acting, operation=str(operation.operation_id)))
    wait_until(lambda: LetterOperations(engine).get(operation.operation_id).outcomes == {"redriven": 1})
    assert acting.post("/operations/resume", data=form(acting, operation="999")).status_code == 400


def test_a_form_that_is_not_of_this_session_changes_nothing(
    open_dashboard: Open, open_acting: Open, engine: Engine
) -> None:
    acting, other = open_acting("anna"), open_acting("ben")
    park(engine, "a")
    mine, theirs = form(acting, note="x"), form(other, note="x")
    refused = [
        acting.post("/letters/discard", data={"note": "x"}),
        acting.post("/letters/discard", data={"note": "x", "forgery_token": ""}),
        acting.post("/letters/discard", data=theirs),
        acting.post("/letters/discard", data=mine, headers={"Sec-Fetch-Site": "cross-site"}),
        acting.post("/letters/discard", data=mine, headers={"Origin": "http://evil.example"}),
        acting.post("/letters/discard", json=mine),
        acting.post(
            "/letters/discard", content=b"x" * 300_000, headers={"Content-Type": "application/x-www-form-urlencoded"}
        ),
        acting.get("/letters/discard", params=mine),
    ]
    assert [answer.status_code for answer in refused] == [403, 403, 403, 403, 403, 400, 400, 405]
    assert open_dashboard().post("/letters/discard", data=mine).status_code == 403  # it only reads
    assert open_dashboard(token=TOKEN, allow_actions=True).post("/letters/discard", data=mine).status_code == 303
    assert LetterOperations(engine).list() == []


@pytest.mark.parametrize("path", ACTIONS)
def test_a_dashboard_that_only_reads_refuses_every_action(pages: TestClient, engine: Engine, path: str) -> None:
    park(engine, "a")
    answer = pages.post(path, data={"forgery_token": "", "up_to": "999999", "note": "x", "subscriber": "billing"})
    assert (answer.status_code, "only reads" in answer.text) == (403, True)
    assert LetterOperations(engine).list() == []


def test_a_pause_is_heeded_and_on_record(acting: TestClient, engine: Engine) -> None:
    Inbox("billing")
    answer = acting.post("/pause", data=form(acting, subscriber="billing", note="repair"))
    assert answer.headers["location"] == "/subscriber?id=billing"
    acting.post("/pause", data=form(acting, destination="own:x"))
    with engine.connect() as connection:
        assert {(one.kind, one.name, one.paused_by) for one in read_pauses(connection)} == {
            ("subscriber", "billing", "anna"),
            ("destination", "own:x", "anna"),
        }
    acting.post("/resume", data=form(acting, subscriber="billing"))
    acting.post("/resume", data=form(acting, subscriber="billing"))  # it is not paused any more: nothing is done
    with engine.connect() as connection:
        assert [(one.actor, one.action, one.target) for one in read_actions(connection)] == [
            ("anna", "resume", "billing"),
            ("anna", "pause", "own:x"),
            ("anna", "pause", "billing"),
        ]
    assert acting.post("/pause", data=form(acting)).status_code == 400


def test_what_cannot_be_put_on_record_is_not_done(acting: TestClient, engine: Engine) -> None:
    fields = form(acting, subscriber="billing")
    run(engine, "ALTER TABLE operator_action RENAME TO away")
    assert acting.post("/pause", data=fields).status_code == 503
    with engine.connect() as connection:
        assert read_pauses(connection) == ()


def test_errors_are_redacted_wherever_they_are_shown(open_dashboard: Open, engine: Engine) -> None:
    park(engine, "a", error="card 4111")
    Failures(engine, "billing").fail("b", ValueError("card 4111"))
    run(
        engine,
        "INSERT INTO bulk_load (run_id, subscriber_id, source, digest, writer, chunks, bounds, error) "
        "VALUES ('0a1b2c3d4e5f', 'billing', 'events', '', 'copy', 5, '[]', 'card 4111')",
    )
    run(
        engine,
        "INSERT INTO outbox_message (lane, message_id, destination, key, headers, body, attempts, held, due_at, error) "
        "VALUES (1, 'c', 'own:x', 'k', '{}', '', 2, true, now() + interval '1 h', 'card 4111')",
    )
    run(
        engine,
        "INSERT INTO dead_letter_operation (kind, filter, requested_by) VALUES "
        """('redrive', '{"error": "card 4111", "headers": {"card": "4111"}, "json_path": "$.a == 4111"}', 'anna')""",
    )
    run(
        engine,
        "INSERT INTO dead_letter_selection (operation_id, dead_letter_id, outcome, error) "
        "SELECT operation_id, 1, 'failed', 'not sent: card 4111' FROM dead_letter_operation",
    )
    pages = open_dashboard(redact=lambda what: what.text.replace("4111", "****"))
    assert "not sent: card ****" in text_of(pages, "/letter?number=1")
    assert "error card ****, headers card, json path hidden" in text_of(pages, "/letters")
    messages = [f"/message?id={message_id}" for message_id in "abc"]
    for path in ("/letters", "/letter?number=1", *messages, "/loads", "/outbox"):
        text = text_of(pages, path)
        assert "4111" not in text, path
        assert "card ****" in text, path
    # A filter would tell what is hidden, by what it finds.
    for path in ("/letters?error=card+4111", "/letters/confirm?action=discard&error=card+4111"):
        assert "no filter looks into them" in pages.get(path).text, path
    assert "card ****" in text_of(pages, "/subscriber?id=billing")


def test_a_secret_is_not_cut_in_two_before_it_is_redacted(open_dashboard: Open, engine: Engine) -> None:
    park(engine, "a", error="x" * 490 + "4111222233334444")
    run(
        engine,
        "INSERT INTO outbox_relay (relay_id, host, pid, outages) "
        """VALUES ('r', 'h', 1, '{"own:x": "login of 4111222233334444"}')""",
    )
    run(
        engine,
        "INSERT INTO outbox_message (lane, message_id, destination, headers, body, attempts, error, due_at) "
        "VALUES (1, 'c', 'own:x', '{}', '', 2, repeat('x', 490) || '4111222233334444', now())",
    )
    pages = open_dashboard(redact=lambda what: re.sub(r"\d{16}", "****", what.text))
    for path in ("/letters", "/letter?number=1", "/message?id=a", "/message?id=c", "/outbox"):
        text = text_of(pages, path)
        assert "4111" not in text, path
        assert "****" in text, path
