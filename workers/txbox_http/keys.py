"""Read the key in the header Idempotency-Key, and make the message id from it."""

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

from txbox.errors import InvalidConfiguration

MAX_KEY_CHARACTERS = 255

# RFC 8941, section 3.3.3: a String. Many clients send the key without quotation marks, so that is accepted, too.
_QUOTED = re.compile(rb'"((?:[^"\\]|\\["\\])*)"')
_ESCAPED = re.compile(rb'\\(["\\])')
_KEY = re.compile(rf"[!-~]{{1,{MAX_KEY_CHARACTERS}}}")
_BARE = re.compile(rb'[^"\\,;\s]+')


class InvalidKey(ValueError):
    """A header without an acceptable key; the text says why."""


def key_of(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return a request's key, of 1 to 255 visible ASCII characters without blanks; None if it has none.

    Raises:
        InvalidKey: it has several keys, or one that is not acceptable.
    """
    values = [value.strip() for name, value in headers if name.lower() == b"idempotency-key"]
    if not values:
        return None
    if len(values) > 1:
        raise InvalidKey("the header Idempotency-Key came more than once")
    (value,) = values
    if quoted := _QUOTED.fullmatch(value):
        value = _ESCAPED.sub(rb"\1", quoted[1])
    elif not _BARE.fullmatch(value):
        raise InvalidKey('it must be one string, such as "8e03978e-40d5-43e8-bc93-6894a57f9324"')
    key = value.decode("latin-1")
    if not _KEY.fullmatch(key):
        raise InvalidKey(f"it must be 1 to {MAX_KEY_CHARACTERS} visible characters of ASCII, without blanks")
    return key


def message_id(key: str, caller: str | None = None) -> str:
    """Return the message id of a key: the key itself, or for a caller's key, the caller's name, a blank and the key.

    A key contains no blank, and neither does the name, in which everything but letters and digits is percent-encoded.
    So no key of one caller has the message id of another caller's.

    Raises:
        InvalidConfiguration: the caller's name is empty or not text.
    """
    if not isinstance(caller, str | None):
        raise InvalidConfiguration(f"a caller's name must be a str, not {type(caller).__name__}")
    if caller == "":
        raise InvalidConfiguration("a caller has a name, or None where all callers are one; not an empty text")
    return key if caller is None else f"{quote(caller, safe='')} {key}"


def request_fingerprint(scope: Mapping[str, Any], body: bytes) -> bytes:
    """Return the SHA-256 of a request: its method, its path with the query, and its body."""
    digest = hashlib.sha256()
    path = scope.get("raw_path") or scope["path"].encode()
    for part in (scope["method"].encode(), path, scope.get("query_string", b""), body):
        digest.update(len(part).to_bytes(8, "big") + part)  # with its length, so that no two requests look the same
    return digest.digest()
