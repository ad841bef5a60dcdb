"""An answer: a whole response to a request, as it is sent, kept and sent again."""

import base64
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Headers = tuple[tuple[bytes, bytes], ...]

NOT_KEPT = frozenset(
    {
        # belong to the connection (RFC 9110, section 7.6.1)
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        # belong to the moment
        b"date",
        b"server",
        b"retry-after",
        # computed again from the body
        b"content-length",
        # a session's secret, which does not belong in a table
        b"set-cookie",
    }
)
"""Headers that a repeat does not get."""

REPLAYED = (b"idempotent-replayed", b"true")
"""The header of an answer that was given before."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A response.

    Attributes:
        status: its status code.
        headers: names, in lower case, and values; in order.
        body: the whole body, or its last part if other parts have been sent.
        is_whole: whether ``body`` is the whole body.
    """

    status: int
    headers: Headers
    body: bytes
    is_whole: bool = True

    def messages(self) -> list[dict[str, Any]]:
        """Return the ASGI messages that send it."""
        return [
            {"type": "http.response.start", "status": self.status, "headers": list(self.headers)},
            {"type": "http.response.body", "body": self.body, "more_body": False},
        ]

    def replayed(self) -> "Answer":
        """Return what a repeat gets of an answer that was kept."""
        has_length = self.status >= 200 and self.status not in (204, 304)  # RFC 9110, section 8.6
        length = ((b"content-length", str(len(self.body)).encode()),) if has_length else ()
        return Answer(self.status, (*self.headers, *length, REPLAYED), self.body)


def kept_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[list[str]]:
    """Return the headers to keep, as text."""
    return [
        [name.decode("latin-1"), value.decode("latin-1")] for name, value in headers if name.lower() not in NOT_KEPT
    ]


def headers_of(kept: Iterable[Iterable[str]]) -> Headers:
    """Return kept headers as ASGI has them."""
    return tuple((name.encode("latin-1"), value.encode("latin-1")) for name, value in kept)


def encoded(answer: Answer) -> bytes:
    """Return an answer as JSON, for a ledger; ``decoded`` reads it."""
    body = base64.b64encode(answer.body).decode()
    return json.dumps([answer.status, kept_headers(answer.headers), body]).encode()


def decoded(kept: bytes) -> Answer:
    status, headers, body = json.loads(kept)
    return Answer(status, headers_of(headers), base64.b64decode(body))
