"""Who may see the pages and who may act: sessions, the throttle, tokens against forged requests, security headers.

A person gives the dashboard's token once and gets a session: a cookie signed with a key made from the token. So it
needs no store, several processes accept it, and another token ends all sessions. A process remembers which sessions
were signed out of it and refuses copies of their cookies. Other processes do not know of them, nor does this one after
a restart.

An action must come from a page of the same site and carry the session's token against forgery. Three checks see to
that. Each is enough alone, as a browser may lack one: only the same site sends the cookie (SameSite), the request says
where it comes from (``Sec-Fetch-Site``, else ``Origin``), and its form has the token.
https://cheatsheetseries.owasp.org/cheatsheets/Cross-Site_Request_Forgery_Prevention_Cheat_Sheet.html
"""

import base64
import hashlib
import hmac
import json
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SESSION_SECONDS = 12 * 3600

ENDED_SESSIONS = 10_000
"""The most signed-out sessions remembered one by one until they run out."""

COOKIE = "txbox_session"

WINDOW_SECONDS = 300
"""How long a wrong token counts."""

GUESSES = 10
"""The most wrong tokens of one address within the window."""

GUESSES_IN_ALL = 100
"""The most wrong tokens of all addresses within the window."""

SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Headers of every answer. Pages have no inline script or style, so nothing in a message can become one."""


@dataclass(frozen=True, slots=True)
class Session:
    """A person who has signed in. The forms of that person's pages carry ``forgery_token``."""

    name: str
    forgery_token: str


@dataclass(frozen=True, slots=True)
class _SignedIn:
    """What a valid cookie holds."""

    name: str
    until: int
    text: bytes
    signature: bytes


class Sessions:
    """Makes, reads and ends session cookies."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()
        self._key = hmac.digest(self._token, b"txbox dashboard: sessions", hashlib.sha256)
        self._ended: dict[bytes, int] = {}
        """When each signed-out session would have run out, by its signature."""
        self._ended_until = 0
        """Sessions that run out by then are refused, even if the clock is set back: some of them were signed out and
        are no longer remembered."""

    def admits(self, token: str) -> bool:
        """Whether this is the dashboard's token. The comparison takes as long for any text."""
        return hmac.compare_digest(
            hmac.digest(self._key, token.encode(), hashlib.sha256), hmac.digest(self._key, self._token, hashlib.sha256)
        )

    def cookie(self, name: str) -> str:
        """Return the cookie of a new session."""
        session = {"name": name, "until": int(time.time()) + SESSION_SECONDS, "id": secrets.token_urlsafe(12)}
        text = json.dumps(session).encode()
        return f"{_encoded(text)}.{_encoded(self._signature(text))}"

    def read(self, cookie: str | None) -> Session | None:
        """Return a cookie's session, or None if it is not ours or has ended."""
        found = self._found(cookie)
        return None if found is None else Session(found.name, forgery_token(self._key, found.text))

    def end(self, cookie: str | None) -> None:
        """End a cookie's session, so that copies of the cookie are refused. Ignore a cookie that has none."""
        found = self._found(cookie)
        if found is None:
            return
        now = time.time()
        self._ended_until = max([self._ended_until, *(until for until in self._ended.values() if until < now)])
        self._ended = {signature: until for signature, until in self._ended.items() if until >= now}
        self._ended[found.signature] = found.until
        if len(self._ended) > ENDED_SESSIONS:
            first = min(self._ended, key=self._ended.__getitem__)
            self._ended_until = max(self._ended_until, self._ended.pop(first))

    def _found(self, cookie: str | None) -> "_SignedIn | None":
        try:
            text, signature = (_decoded(part) for part in (cookie or "").split("."))
            if not hmac.compare_digest(signature, self._signature(text)):
                return None
            session: Any = json.loads(text)
        except ValueError:
            return None
        found = _SignedIn(str(session["name"]), session["until"], text, signature)
        if found.until < time.time() or found.until <= self._ended_until or signature in self._ended:
            return None
        return found

    def _signature(self, text: bytes) -> bytes:
        return hmac.digest(self._key, b"session:" + text, hashlib.sha256)


class Throttle:
    """Limits wrong tokens, of each address and in total. Not thread-safe.

    It keeps the wrong tokens of the last ``WINDOW_SECONDS``: when each came, and from where. It checks at most
    ``GUESSES_IN_ALL`` in that time, so it keeps no more than these, however many addresses guess. Each process has its
    own.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` returns seconds that never decrease."""
        self._clock = clock
        self._wrong: deque[tuple[float, str]] = deque(maxlen=GUESSES_IN_ALL)

    def wait_seconds(self, address: str | None) -> float:
        """Return the seconds until a token from this address is checked again; 0 means now."""
        now, guesser = self._clock(), _guesser(address)
        while self._wrong and self._wrong[0][0] + WINDOW_SECONDS <= now:
            self._wrong.popleft()
        own = [at for at, of in self._wrong if of == guesser]
        everyone = [at for at, _ in self._wrong]
        bounds = ((own, GUESSES), (everyone, GUESSES_IN_ALL))
        return max((times[-most] + WINDOW_SECONDS - now for times, most in bounds if len(times) >= most), default=0)

    def note(self, address: str | None) -> None:
        """Count a wrong token of this address."""
        self._wrong.append((self._clock(), _guesser(address)))


def _guesser(address: str | None) -> str:
    """Return what an address counts as: an IPv6 address as its /64 network, and all that are no address as one."""
    try:
        found = ip_address(address or "")
    except ValueError:
        return ""
    if isinstance(found, IPv6Address):
        return str(found.ipv4_mapped or int(found) >> 64)
    return str(found)


def forgery_token(key: bytes, of: bytes) -> str:
    """Return the token that forms carry, for one session or one person."""
    return _encoded(hmac.digest(key, b"forms:" + of, hashlib.sha256))


def is_same_site(headers: Mapping[str, str]) -> bool:
    """Whether a request comes from a page of this site, as far as the browser says."""
    fetch_site = headers.get("sec-fetch-site")
    if fetch_site is not None:
        return fetch_site == "same-origin"
    origin = headers.get("origin")
    return origin is None or urlsplit(origin).netloc == headers.get("host")


def _encoded(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).decode()


def _decoded(text: str) -> bytes:
    return base64.b64decode(text.encode("ascii"), b"-_", validate=True)


class SecurityHeaders:
    """Adds the security headers to every answer, and refuses host names that are not ours.

    This stops DNS rebinding: a page of another site whose name is made to lead to 127.0.0.1 has that name in ``Host``.
    """

    def __init__(self, app: ASGIApp, allowed_hosts: Sequence[str] | None) -> None:
        """Wrap an application. ``allowed_hosts`` None allows any name."""
        self._app = app
        self._allowed = None if allowed_hosts is None else frozenset(name.lower() for name in allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        host = Headers(scope=scope).get("host", "")
        if self._allowed is not None and _name_of(host) not in self._allowed:
            answer = PlainTextResponse("This name of the host is not allowed; see --allowed-host.\n", 421)
            await answer(scope, receive, send_with_headers)
            return
        await self._app(scope, receive, send_with_headers)


def _name_of(host: str) -> str:
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""
