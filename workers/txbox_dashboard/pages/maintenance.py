"""The page of what is kept and forgotten, of audits, and of what people have done."""

from typing import Any

from txbox.operations.actions import AUDIT, read_actions
from txbox.operations.pauses import read_pauses
from txbox.status import Runway, read_runway
from txbox_dashboard.view import Page, Request

SHOWN = 50


def maintenance(request: Request) -> Page:
    """Show what is kept, how far back subscribers remember, what audits have found, and what people have done."""
    reader = request.reader
    place: Any = {"schema": reader.schema, "prefix": reader.prefix}
    runway: Runway | None = reader.read("what is kept", lambda connection: read_runway(connection, **place))
    audits = reader.read("audits", lambda connection: read_actions(connection, kinds=[AUDIT], limit=SHOWN, **place))
    actions = reader.read("actions", lambda connection: read_actions(connection, without=[AUDIT], limit=SHOWN, **place))
    pauses = reader.read("what is paused", lambda connection: read_pauses(connection, **place))
    latest: dict[str, Any] = {}
    for one in audits or ():
        latest.setdefault(one.target, one)
    return Page(
        "maintenance.html",
        {
            "runway": runway,
            "audits": list(latest.values()),
            "actions": actions or (),
            "pauses": pauses or (),
        },
    )
