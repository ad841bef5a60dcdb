"""The dashboard as an ASGI application."""

import logging
import math
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from txbox import SchemaMissing, TxboxError
from txbox.postgres.engines import adopt
from txbox.postgres.sqlstates import UNDEFINED_COLUMN, UNDEFINED_TABLE, sqlstate
from txbox.text import text_of
from txbox_dashboard.access import (
    COOKIE,
    SESSION_SECONDS,
    SecurityHeaders,
    Session,
    Sessions,
    Throttle,
    forgery_token,
    is_same_site,
)
from txbox_dashboard.actions import Action, ActionFunction, ActionRefused, pause_it, resume_it
from txbox_dashboard.letter_runner import LetterRunner
from txbox_dashboard.pages.leases import leases
from txbox_dashboard.pages.letters import confirm, discard, letter, letters, redrive, resume_operation, stop_operation
from txbox_dashboard.pages.loads import loads
from txbox_dashboard.pages.maintenance import maintenance
from txbox_dashboard.pages.messages import message
from txbox_dashboard.pages.outbox import outbox
from txbox_dashboard.pages.overview import overview, subscriber
from txbox_dashboard.reader import Reader
from txbox_dashboard.settings import DashboardSettings, Identify, Redact, Send
from txbox_dashboard.view import Page, PageFunction, Renderer, Request, query_of, span

__all__ = ["dashboard"]

FORM_BYTES = 256 * 1024
"""The largest body of an action."""

NAME_CHARACTERS = 100
"""The longest name that a person may give."""


@dataclass(frozen=True, slots=True)
class Place:
    """A page: its path, its title, its function, whether the navigation lists it, and whether it refreshes itself."""

    path: str
    title: str
    show: PageFunction
    in_navigation: bool = True
    refreshes: bool = True


PLACES: Sequence[Place] = (
    Place("/", "Overview", overview),
    Place("/subscriber", "Subscriber", subscriber, in_navigation=False),
    Place("/message", "Message", message, in_navigation=False),
    Place("/letters", "Dead letters", letters),
    Place("/letter", "Dead letter", letter, in_navigation=False),
    Place("/letters/confirm", "Confirm", confirm, in_navigation=False, refreshes=False),
    Place("/outbox", "Outbox", outbox),
    Place("/leases", "Leases", leases),
    Place("/loads", "Bulk loads", loads),
    Place("/maintenance", "Maintenance", maintenance),
)
"""All pages, in the order of the navigation."""

ACTIONS: Mapping[str, ActionFunction] = {
    "/letters/redrive": redrive,
    "/letters/discard": discard,
    "/operations/resume": resume_operation,
    "/operations/stop": stop_operation,
    "/pause": pause_it,
    "/resume": resume_it,
}
"""What the pages' forms ask for, by path."""


def dashboard(
    engine: Engine,
    *,
    schema: str | None = None,
    prefix: str = "",
    allow_actions: bool = False,
    token: str | None = None,
    identify: Identify | None = None,
    show_bodies: bool = False,
    redact: Redact | None = None,
    allowed_hosts: Sequence[str] | None = None,
    send: Send | None = None,
) -> Starlette:
    """Return the dashboard of a database, to mount in an application of FastAPI or Starlette or to serve alone.

    Nothing connects before the first request. By default it shows everything except bodies and headers to everyone who
    can reach it, and changes nothing.

    Args:
        engine: the database. A role that may only read is enough unless actions are allowed.
        schema: the Postgres schema that holds the tables; None leaves it to the search path.
        prefix: what the tables' names start with.
        allow_actions: let people redrive and discard dead letters, pause and resume. Requires ``token`` or
            ``identify``.
        token: a secret of at least 16 characters that a person must give to see any page.
        identify: returns who makes a request, in place of a token; None refuses it. For applications that know their
            users. Forms are then signed with ``token``, or else with a key of this process: give a token if several
            processes serve.
        show_bodies: show the bodies and headers of messages.
        redact: changes texts of messages before they are shown.
        allowed_hosts: the host names by which it may be reached; None allows any.
        send: returns a dead letter to its source; None sends it to its queue, as ``txbox dead-letters redrive`` does.

    Raises:
        InvalidConfiguration: the arguments cannot work.
    """
    settings = DashboardSettings(
        schema, prefix, allow_actions, token, identify, show_bodies, redact, allowed_hosts, send
    )
    return _Dashboard(adopt(engine), settings).application()


class _Dashboard:
    def __init__(self, engine: Engine, settings: DashboardSettings) -> None:
        self._engine = engine
        self._settings = settings
        self._sessions = Sessions(settings.token) if settings.signs_in and settings.token is not None else None
        self._throttle = Throttle()
        self._form_key = (settings.token or secrets.token_urlsafe()).encode()
        self._renderer = Renderer()
        self._runner = LetterRunner(engine, settings)

    def application(self) -> Starlette:
        pages = [Route(place.path, self._page(place), methods=["GET"]) for place in PLACES]
        actions = [Route(path, self._action(act), methods=["POST"]) for path, act in ACTIONS.items()]
        return Starlette(
            routes=[
                *pages,
                *actions,
                Route("/sign-in", self._sign_in, methods=["GET", "POST"]),
                Route("/sign-out", self._sign_out, methods=["POST"]),
                Mount("/static", _Static(directory=Path(__file__).parent / "static")),
            ],
            middleware=[Middleware(SecurityHeaders, allowed_hosts=self._settings.allowed_hosts)],
            exception_handlers={404: self._not_found},
        )

    # --- pages --------------------------------------------------------------------------------------------------------

    def _page(self, place: Place) -> Callable[[HttpRequest], Awaitable[Response]]:
        async def answer(http: HttpRequest) -> Response:
            session = self._session(http)
            if session is None:
                return self._refuse(http, place)
            reader = Reader(self._engine, self._settings.schema, self._settings.prefix)
            request = Request(reader, http.query_params, self._settings, self._runner, session.name or None)
            page = await run_in_threadpool(_shown, place, request)
            response = self._html(http, page, session, place=place, reader=reader)
            response.headers["Server-Timing"] = f"db;dur={reader.seconds * 1000:.1f}"
            return response

        return answer

    def _html(
        self,
        http: HttpRequest,
        page: Page,
        session: Session | None,
        *,
        place: Place | None = None,
        reader: Reader | None = None,
    ) -> Response:
        root = http.scope.get("root_path", "")
        shared = {
            "layout": "live.html" if http.headers.get("hx-request") == "true" else "layout.html",
            "root": root,
            "here": f"{http.url.path}?{http.url.query}" if http.url.query else http.url.path,
            "place": place,
            "refreshes": place is not None and place.refreshes,
            "places": [one for one in PLACES if one.in_navigation],
            "who": session.name if session else None,
            "forgery_token": session.forgery_token if session else "",
            "may_act": session is not None and self._settings.allow_actions,
            "signs_in": self._sessions is not None,
            "milliseconds": reader.seconds * 1000 if reader else None,
            "left_out": reader.left_out if reader else {},
        }
        return HTMLResponse(self._renderer.html(page, **shared), page.status, headers={"Vary": "HX-Request"})

    async def _not_found(self, http: HttpRequest, _error: Exception) -> Response:
        text = "There is no such page."
        return self._html(http, Page("problem.html", {"title": "Not found", "text": text}, 404), None)

    # --- who it is ----------------------------------------------------------------------------------------------------

    def _session(self, http: HttpRequest) -> Session | None:
        """Return who makes a request: with an empty name where everyone may see, or None if it is refused."""
        if self._settings.identify is not None:
            name = self._settings.identify(http)
            return Session(name, forgery_token(self._form_key, name.encode())) if name else None
        if self._sessions is not None:
            return self._sessions.read(http.cookies.get(COOKIE))
        return Session("", "")

    def _refuse(self, http: HttpRequest, place: Place | None = None) -> Response:
        if self._sessions is None:
            return PlainTextResponse("You are not allowed to see this.\n", 403)
        wanted = place and f"{place.path}?{http.url.query}".removesuffix("?")
        target = f"{http.scope.get('root_path', '')}/sign-in?{query_of({'next': wanted})}".removesuffix("?")
        if http.headers.get("hx-request") == "true":
            return Response(status_code=401, headers={"HX-Redirect": target})
        return RedirectResponse(target, 303)

    async def _sign_in(self, http: HttpRequest) -> Response:
        root = http.scope.get("root_path", "")
        if self._sessions is None:
            return RedirectResponse(f"{root}/", 303)
        if http.method == "GET":
            return self._sign_in_page(http, None, 200, http.query_params.get("next", ""))
        form = await _form(http)
        if form is None or not is_same_site(http.headers):
            return PlainTextResponse("This form comes from another site.\n", 403)
        wanted = _last(form, "next")
        address = http.client.host if http.client else None
        wait = math.ceil(self._throttle.wait_seconds(address))
        if wait:  # the token is not looked at, so a right guess cannot be told from a wrong one
            refused = f"Too many wrong tokens were given. Wait {span(wait)}, and try again."
            response = self._sign_in_page(http, refused, 429, wanted)
            response.headers["Retry-After"] = str(wait)
            return response
        name = " ".join(_last(form, "name").split())[:NAME_CHARACTERS]
        if not self._sessions.admits(_last(form, "token")):
            self._throttle.note(address)
            _log.warning("a token was refused; it came from %s", address or "unknown")
            return self._sign_in_page(http, "This is not the token.", 403, wanted)
        if not name:
            return self._sign_in_page(http, "Say who you are, for the record.", 400, wanted)
        is_secure = http.url.scheme == "https"
        if not is_secure and http.headers.get("x-forwarded-proto") == "https":
            _log.warning(
                "the cookie is not Secure: %s says that the request came over TLS, but is not trusted; if it is your "
                "proxy, name it: --trusted-proxy %s",
                address or "what sent it",
                address or "ADDRESS",
            )
        path, _, query = wanted.partition("?")
        is_ours = any(path == place.path for place in PLACES)  # nothing else: it may name another site
        response = RedirectResponse(root + (f"{path}?{query}".removesuffix("?") if is_ours else "/"), 303)
        response.set_cookie(
            COOKIE,
            self._sessions.cookie(name),
            max_age=SESSION_SECONDS,
            path=f"{root}/",
            secure=is_secure,
            httponly=True,
            samesite="strict",
        )
        return response

    def _sign_in_page(self, http: HttpRequest, refused: str | None, status: int, wanted: str) -> Response:
        return self._html(http, Page("sign_in.html", {"refused": refused, "next": wanted}, status), None)

    async def _sign_out(self, http: HttpRequest) -> Response:
        root = http.scope.get("root_path", "")
        response = RedirectResponse(f"{root}/sign-in", 303)
        if is_same_site(http.headers):
            if self._sessions is not None:
                self._sessions.end(http.cookies.get(COOKIE))
            response.delete_cookie(COOKIE, path=f"{root}/")
        return response

    # --- actions ------------------------------------------------------------------------------------------------------

    def _action(self, act: ActionFunction) -> Callable[[HttpRequest], Awaitable[Response]]:
        async def answer(http: HttpRequest) -> Response:
            session = self._session(http)
            if session is None:
                return self._refuse(http)
            if not self._settings.allow_actions:
                return PlainTextResponse("This dashboard only reads; actions take --allow-actions.\n", 403)
            form = await _form(http)
            if form is None:
                return PlainTextResponse("This is not the form of a page, or it is too large.\n", 400)
            if not is_same_site(http.headers) or not secrets.compare_digest(
                _last(form, "forgery_token").encode(), session.forgery_token.encode()
            ):
                return PlainTextResponse("This form is not from this session: load its page again.\n", 403)
            fields = {name: values[-1] for name, values in form.items()}
            action = Action(self._engine, fields, self._settings, session.name, self._runner)
            try:
                target = await run_in_threadpool(act, action)
            except ActionRefused as error:
                return self._html(http, Page("problem.html", {"title": "Not done", "text": str(error)}, 400), session)
            except (SQLAlchemyError, TxboxError) as error:
                return self._html(http, _unavailable(error), session)
            return RedirectResponse(f"{http.scope.get('root_path', '')}{target}", 303)

        return answer


def _shown(place: Place, request: Request) -> Page:
    try:
        return place.show(request)
    except (SQLAlchemyError, TxboxError) as error:
        return _unavailable(error)


def _unavailable(error: Exception) -> Page:
    """Return the page for a database that cannot be used, without the statement and its values."""
    text = text_of(error.orig or error) if isinstance(error, DBAPIError) else text_of(error)
    text = text.partition("\n")[0]
    if isinstance(error, DBAPIError) and sqlstate(error) in (UNDEFINED_TABLE, UNDEFINED_COLUMN):
        text += f"; {SchemaMissing.remedy} creates the tables, and brings them up to date"
    return Page("problem.html", {"title": "The database cannot be used", "text": text}, 503)


async def _form(http: HttpRequest) -> Mapping[str, list[str]] | None:
    """Return a form's fields, or None if the body is not a form or is too large."""
    if http.headers.get("content-type", "").partition(";")[0].strip() != "application/x-www-form-urlencoded":
        return None
    body = bytearray()
    async for part in http.stream():
        body += part
        if len(body) > FORM_BYTES:
            return None
    try:
        return parse_qs(body.decode("utf-8"), keep_blank_values=True, max_num_fields=10_000)
    except ValueError:
        return None


def _last(form: Mapping[str, list[str]], name: str) -> str:
    return form.get(name, [""])[-1]


class _Static(StaticFiles):
    """Scripts, styles and the icon. A browser must ask whether they have changed."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers["Cache-Control"] = "no-cache"
        return response


_log = logging.getLogger("txbox.dashboard")
