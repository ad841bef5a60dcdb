"""Actions: what a person does from a page, with who it was on record."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine

from txbox.postgres.sql_files import SqlFile
from txbox.text import storable
from txbox_dashboard.settings import Settings


class ActionStatements(SqlFile, file="actions.sql"):
    """The statements of ``actions.sql``."""

    note_action: str
    last_actions: str


@dataclass(frozen=True, slots=True)
class Action:
    """What is asked for.

    Attributes:
        engine: the database.
        form: the fields of the form; the last value of each.
        lists: the same with all values.
        settings: of the dashboard.
        who: asks for it, for the record.
    """

    engine: Engine
    form: Mapping[str, str]
    lists: Mapping[str, list[str]]
    settings: Settings
    who: str

    def note(self, connection: Connection, action: str, target: str, **detail: Any) -> None:
        """Put the action on record, in the transaction that carries it out, and into the log."""
        statements = ActionStatements.load(self.settings.schema, self.settings.prefix)
        values = {
            "actor": storable(self.who),
            "action": action,
            "target": storable(target),
            "detail": storable(json.dumps(detail)),
        }
        connection.exec_driver_sql(statements.note_action, values)
        _log.warning("%s: %s %s", self.who, action, target)


class Refused(Exception):
    """An action cannot be carried out as it was asked for; its text says why, and what to do."""


ActionFunction = Callable[[Action], str]
"""Carries an action out, and returns the path and query of the page that is shown next; or raises ``Refused``."""

_log = logging.getLogger("txbox.dashboard")
