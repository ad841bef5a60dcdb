"""Actions: what a person does from a page, with who it was on record."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Engine

from txbox.operator_actions import note_action
from txbox.postgres.transactions import short_transaction
from txbox_dashboard.letters.runner import LetterRunner
from txbox_dashboard.settings import Settings


@dataclass(frozen=True, slots=True)
class Action:
    """What is asked for.

    Attributes:
        engine: the database.
        form: the fields of the form; the last value of each.
        lists: the same with all values.
        settings: of the dashboard.
        who: asks for it, for the record.
        runner: carries operations on letters out.
    """

    engine: Engine
    form: Mapping[str, str]
    lists: Mapping[str, list[str]]
    settings: Settings
    who: str
    runner: LetterRunner

    def record(self, action: str, target: str, **detail: Any) -> None:
        """Put an action on record, and into the log."""
        given = {name: value for name, value in detail.items() if value is not None}
        with short_transaction(self.engine) as connection:
            note_action(
                connection,
                action,
                target,
                by=self.who,
                detail=given,
                schema=self.settings.schema,
                prefix=self.settings.prefix,
            )
        self.log(action, target)

    def log(self, action: str, target: str) -> None:
        """Put an action into the log that is on record elsewhere."""
        _log.warning("%s: %s %r", self.who, action, target)


class Refused(Exception):
    """An action cannot be carried out as it was asked for; its text says why, and what to do."""


ActionFunction = Callable[[Action], str]
"""Carries an action out, and returns the path and query of the page that is shown next; or raises ``Refused``."""

_log = logging.getLogger("txbox.dashboard")
