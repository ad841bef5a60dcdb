"""Output outside of a terminal: one row is one line, and nothing is interpreted."""

import datetime
import json

import pytest

from txbox_cli.output import print_json, print_table, printable


def test_a_row_is_a_line_however_long(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("id", "error"), [("m-1", "x" * 500), ("m-2", "[bold]no[/] markup :smile:")])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert "x" * 500 in lines[1]
    assert "[bold]no[/] markup :smile:" in lines[2]
    assert "\x1b" not in "".join(lines)


def test_what_would_steer_a_terminal_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("id",), [("m\x1b[2J\n7",)])
    assert "m\\x1b[2J\\n7" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "shown"),
    [("größer €", "größer €"), ("a\x00b\x1b[1m", "a\\x00b\\x1b[1m"), ("a\nb", "a\\nb"), ("\u202egnp", "\\u202egnp")],
)
def test_printable(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_line_ends_can_be_kept() -> None:
    assert printable("a\n\x1bb", keep="\n") == "a\n\\x1bb"


def test_json_takes_times_bytes_and_anything(capsys: pytest.CaptureFixture[str]) -> None:
    moment = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    print_json({"at": moment, "body": b"\xff{}", "path": {1}})
    assert json.loads(capsys.readouterr().out) == {
        "at": "2026-01-02T00:00:00+00:00",
        "body": "\\xff{}",
        "path": "{1}",
    }
