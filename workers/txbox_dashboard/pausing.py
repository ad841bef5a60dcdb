"""Pauses that a page requests."""

from urllib.parse import urlencode

from txbox.operations.pauses import pause, resume
from txbox_dashboard.actions import Action, ActionRefused, NothingDone

NOTE_CHARACTERS = 500


def pause_it(action: Action) -> str:
    named, back = _named(action)
    note = action.form.get("note", "").strip()[:NOTE_CHARACTERS] or None
    place = {"schema": action.settings.schema, "prefix": action.settings.prefix}
    with action.recorded("pause", *named.values(), note=note):
        if not pause(action.engine, **named, by=action.who, note=note, **place):  # type: ignore[arg-type]
            raise NothingDone
    return back


def resume_it(action: Action) -> str:
    named, back = _named(action)
    place = {"schema": action.settings.schema, "prefix": action.settings.prefix}
    with action.recorded("resume", *named.values()):
        if not resume(action.engine, **named, **place):  # type: ignore[arg-type]
            raise NothingDone
    return back


def _named(action: Action) -> tuple[dict[str, str], str]:
    subscriber, destination = action.form.get("subscriber"), action.form.get("destination")
    if subscriber:
        return {"subscriber_id": subscriber}, f"/subscriber?{urlencode({'id': subscriber}, errors='replace')}"
    if destination:
        return {"destination": destination}, "/outbox"
    raise ActionRefused("Say what: a subscriber or a destination.")
