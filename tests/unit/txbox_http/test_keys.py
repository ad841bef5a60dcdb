"""Keys: what is taken, and that no two requests or callers look the same."""

import pytest

from txbox.errors import InvalidConfiguration
from txbox_http.keys import InvalidKey, key_of, message_id, request_fingerprint

UUID = "8e03978e-40d5-43e8-bc93-6894a57f9324"


def headers(*values: str) -> list[tuple[bytes, bytes]]:
    return [(b"Idempotency-Key", value.encode("latin-1")) for value in values]


@pytest.mark.parametrize(
    ("value", "key"), [(f'"{UUID}"', UUID), (UUID, UUID), (r'"a\"b\\c"', 'a"b\\c'), (f' "{"k" * 255}" ', "k" * 255)]
)
def test_a_key_is_a_string_with_or_without_quotation_marks(value: str, key: str) -> None:
    assert key_of(headers(value)) == key
    assert key_of([]) is None


@pytest.mark.parametrize(
    "value",
    ["", '""', '"a b"', '"a', 'a"', '"a", "b"', "a,b", '"a";b', "a b", r'"\a"', '"é"', "é", "k" * 256, '"\x7f"'],
)
def test_other_values_are_refused(value: str) -> None:
    with pytest.raises(InvalidKey):
        key_of(headers(value))


def test_two_headers_are_refused() -> None:
    with pytest.raises(InvalidKey, match="more than once"):
        key_of(headers("a", "a"))


def test_callers_and_keys_make_different_ids() -> None:
    made = {
        message_id(key, caller) for key in ("k", "b%20k", "b k") for caller in (None, "a", "b", "a b", "a%20b", "é")
    }
    assert len(made) == 18 - 1  # "b k" by itself is the caller b's k, but no header has such a key
    with pytest.raises(InvalidConfiguration, match="a name, or None"):
        message_id("k", "")
    assert message_id("k") == "k"


def test_what_tells_a_request_from_others() -> None:
    def digest(
        method: str = "POST", path: bytes = b"/a", query: bytes = b"", body: bytes = b"x", **other: object
    ) -> bytes:
        return request_fingerprint(
            {"method": method, "path": path.decode(), "raw_path": path, "query_string": query, **other}, body
        )

    same = {digest(), digest(headers=[(b"user-agent", b"b")]), digest(client=("127.0.0.1", 1))}
    assert len(same) == 1
    others = {digest("PATCH"), digest(path=b"/b"), digest(path=b"/a%2F"), digest(query=b"x"), digest(body=b"")}
    assert len(same | others | {digest(path=b"/", query=b"a", body=b"x")}) == 7
