"""Actions: what a person does from a page, with who it was on record."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Engine

from txbox.operations.actions import note_action
from txbox.postgres.transactions import short_transaction
from txbox_dashboard.letter_runner import LetterRunner
from txbox_dashboard.settings import DashboardSettings


@dataclass(frozen=True, slots=True)
class Action:
    """What is asked for.

    Attributes:
        engine: the database.
        form: the fields of the form; the last value of each.
        settings: of the dashboard.
        who: asks for it, for the record.
        runner: carries operations on letters out.
    """

    engine: Engine
    form: Mapping[str, str]
    settings: DashboardSettings
    who: str
    runner: LetterRunner

    @contextmanager
    def recorded(self, action: str, target: str, **detail: Any) -> Iterator[None]:
        """Do something that commits by itself, and put it on record; what cannot be put on record is not done.

        It is written before, and committed after it. A ``NothingDone`` that is raised within takes it back.
        """
        given = {name: value for name, value in detail.items() if value is not None}
        place: Any = {"schema": self.settings.schema, "prefix": self.settings.prefix}
        with suppress(NothingDone), short_transaction(self.engine) as connection:
            note_action(connection, action, target, by=self.who, detail=given, **place)
            yield
            self.log(action, target)

    def log(self, action: str, target: str) -> None:
        """Put an action into the log."""
        _log.warning("%s: %s %r", self.who, action, target)


class NothingDone(Exception):
    """There was nothing to do."""


class ActionRefused(Exception):
    """An action cannot be carried out as it was asked for; its text says why, and what to do."""


ActionFunction = Callable[[Action], str]
"""Carries an action out, and returns the path and query of the page that is shown next; or raises ``ActionRefused``."""

_log = logging.getLogger("txbox.dashboard")
