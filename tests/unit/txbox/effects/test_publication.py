"""Rows that a statement has returned, read as messages."""

import pickle
from typing import Any

import pytest
from psycopg import adapters

from txbox import EffectFailed, Outbox, Outgoing
from txbox.effects import publication
from txbox.effects.publication import Publication, ReturnedRows


def rows(types: dict[str, str], *values: tuple[bytes | None, ...], encoding: str = "utf-8") -> ReturnedRows:
    return ReturnedRows([(name, adapters.types.get_oid(of)) for name, of in types.items()], values, encoding)


def read(returned: ReturnedRows) -> list[Outgoing]:
    return list(Publication(Outbox(), "own:here").messages(returned))


def test_each_row_is_a_message() -> None:
    types = {"key": "int8", "body": "jsonb"}
    assert read(rows(types, (b"1", b'{"a": 1}'), (None, b"[]"))) == [
        Outgoing("own:here", '{"a": 1}', key="1"),
        Outgoing("own:here", "[]"),
    ]


@pytest.mark.parametrize("sent", [b"\\x00ff41", b"\\000\\377A"])
def test_bytes_in_both_forms_that_postgres_sends(sent: bytes) -> None:
    assert read(rows({"body": "bytea"}, (sent,))) == [Outgoing("own:here", b"\x00\xffA")]


def test_text_is_in_the_encoding_of_its_connection() -> None:
    assert read(rows({"body": "text"}, (b"\xe9",), encoding="latin1")) == [Outgoing("own:here", "é")]


def test_columns_are_judged_without_rows() -> None:
    with pytest.raises(EffectFailed, match="an unknown column note"):
        read(rows({"body": "text", "note": "text"}))
    with pytest.raises(EffectFailed, match="no column body"):
        read(ReturnedRows.of(None, None))  # type: ignore[arg-type] # a statement without a result needs no connection


def test_many_are_published_in_several_statements(monkeypatch: pytest.MonkeyPatch) -> None:
    published: list[int] = []

    class Counting(Outbox):
        def publish_many(self, connection_or_session: Any, messages: Any) -> list[str]:
            published.append(len(list(messages)))
            return []

    monkeypatch.setattr(publication, "PUBLISHED_AT_ONCE", 2)
    Publication(Counting(), "own:here").publish(None, rows({"body": "text"}, *[(b"x",)] * 5))  # type: ignore[arg-type]
    assert published == [2, 2, 1]


def test_an_outbox_that_was_sent_elsewhere_is_of_the_same_tables() -> None:
    again = pickle.loads(pickle.dumps(Outbox(schema="shop", prefix="a_", notify=False)))
    assert vars(again).keys() == vars(Outbox()).keys()
    assert (again.schema, again.prefix, again._notify) == ("shop", "a_", False)
    assert again._statements is Outbox(schema="shop", prefix="a_")._statements
