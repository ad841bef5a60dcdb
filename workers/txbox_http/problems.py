"""Problems: the answers to requests that are not run, as in RFC 9457, with a link for developers of clients."""

import json

from txbox.errors import Expired, InFlight, InvalidMessageId, Mismatch
from txbox_http.answer import REPLAYED, Answer

DOCUMENTATION = "https://datatracker.ietf.org/doc/draft-ietf-httpapi-idempotency-key-header/"
"""The page that problems link to, unless the service has its own."""

RETRY_SECONDS = 1
"""When to try again, while another request with the key is in progress."""

_KINDS = {
    "key-missing": (400, "Idempotency-Key is missing"),
    "key-invalid": (400, "Idempotency-Key cannot be taken"),
    "outstanding": (409, "A request is outstanding for this Idempotency-Key"),
    "parked": (409, "What has this Idempotency-Key has failed before, and waits for a person"),
    "request-too-large": (413, "The request is too large for an Idempotency-Key"),
    "key-reused": (422, "Idempotency-Key is already used"),
    "key-expired": (422, "Idempotency-Key has expired"),
    "response-too-large": (500, "The response is too large to be kept"),
    "conflict": (503, "The request has met others, again and again"),
}


def problem(kind: str, detail: str, documentation: str = DOCUMENTATION) -> Answer:
    """Return the answer for a kind of problem; ``detail`` says what to do."""
    status, title = _KINDS[kind]
    told = {"type": f"{documentation}#{kind}", "title": title, "status": status, "detail": detail}
    body = json.dumps(told).encode()
    headers = [
        (b"content-type", b"application/problem+json"),
        (b"content-language", b"en"),
        (b"content-length", str(len(body)).encode()),
        (b"link", f'<{documentation}>; rel="describedby"; type="text/html"'.encode()),
    ]
    if kind in ("outstanding", "conflict"):
        headers.append((b"retry-after", str(RETRY_SECONDS).encode()))
    return Answer(status, tuple(headers), body)


def problem_of(error: Exception, documentation: str) -> Answer | None:
    """Return the answer to an inbox's or a ledger's error about the key; None if the error is about something else."""
    match error:
        case InFlight():
            return problem(
                "outstanding", "Another request with this key is at work. Send it again later.", documentation
            )
        case Mismatch():
            return key_reused(documentation)
        case Expired():
            return problem(
                "key-expired",
                "The key is from a time of which it is not known any more what was done. Nothing was done now. Find "
                "out what became of the request before you send it with a new key.",
                documentation,
            )
        case InvalidMessageId():
            return problem("key-invalid", "The key cannot be kept: choose another one, such as a UUID.", documentation)
    return None


def conflict(documentation: str) -> Answer:
    """Return the answer to a request that Postgres has rolled back in favour of others in every run."""
    return problem("conflict", "Nothing was done, because of other requests. Send it again later.", documentation)


def key_reused(documentation: str) -> Answer:
    """Return the answer to a different request with an earlier request's key."""
    return problem("key-reused", "The key came with another request before. Each request needs its own.", documentation)


def parked(documentation: str) -> Answer:
    """Return the answer to a request whose message is a dead letter."""
    return problem(
        "parked", "It was tried and has failed. It is not tried again until a person says so.", documentation
    )


PROCESSED = Answer(204, (REPLAYED,), b"")
"""The answer if the effect is there but no response is kept: a worker has processed a message of this id, or the
response was forgotten."""
