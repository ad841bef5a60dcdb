"""Actions: what a person does from a page, recorded with the person's name."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from sqlalchemy import Engine

from txbox.errors import InvalidConfiguration
from txbox.operations.actions import note_action
from txbox.operations.pauses import pause, resume
from txbox.postgres.transactions import short_transaction
from txbox_dashboard.letter_runner import LetterRunner
from txbox_dashboard.settings import DashboardSettings


@dataclass(frozen=True, slots=True)
class Action:
    """A request to act.

    Attributes:
        form: the form's fields, each with its last value.
        who: the person, for the record.
    """

    engine: Engine
    form: Mapping[str, str]
    settings: DashboardSettings
    who: str
    runner: LetterRunner

    @contextmanager
    def recorded(self, action: str, target: str, **detail: Any) -> Iterator[None]:
        """Do something that commits by itself, and record it. What cannot be recorded is not done.

        The record is inserted before and committed after. A ``NothingDone`` raised within rolls it back.
        """
        given = {name: value for name, value in detail.items() if value is not None}
        place: Any = {"schema": self.settings.schema, "prefix": self.settings.prefix}
        with suppress(NothingDone), short_transaction(self.engine) as connection:
            note_action(connection, action, target, by=self.who, detail=given, **place)
            yield
            self.log(action, target)

    def log(self, action: str, target: str) -> None:
        _log.warning("%s: %s %r", self.who, action, target)


class NothingDone(Exception):
    """There was nothing to do."""


class ActionRefused(Exception):
    """An action was refused. The text says why, and what to do."""


ActionFunction = Callable[[Action], str]
"""Carries out an action and returns the path and query of the next page, or raises ``ActionRefused``."""

NOTE_CHARACTERS = 500
"""The most characters that are kept of a note."""


def pause_it(action: Action) -> str:
    named, back = _named(action)
    note = action.form.get("note", "").strip()[:NOTE_CHARACTERS] or None
    schema, prefix = action.settings.schema, action.settings.prefix
    with action.recorded("pause", *named.values(), note=note):
        try:
            if not pause(action.engine, **named, by=action.who, note=note, schema=schema, prefix=prefix):
                raise NothingDone
        except InvalidConfiguration as error:
            raise ActionRefused(str(error)) from error
    return back


def resume_it(action: Action) -> str:
    named, back = _named(action)
    schema, prefix = action.settings.schema, action.settings.prefix
    with action.recorded("resume", *named.values()):
        if not resume(action.engine, **named, schema=schema, prefix=prefix):
            raise NothingDone
    return back


def _named(action: Action) -> tuple[dict[str, str], str]:
    subscriber, destination = action.form.get("subscriber"), action.form.get("destination")
    if subscriber:
        return {"subscriber_id": subscriber}, f"/subscriber?{urlencode({'id': subscriber}, errors='replace')}"
    if destination:
        return {"destination": destination}, "/outbox"
    raise ActionRefused("Say what: a subscriber or a destination.")


_log = logging.getLogger("txbox.dashboard")
