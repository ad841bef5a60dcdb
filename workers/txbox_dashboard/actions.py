"""Actions: what a person does from a page, with who it was on record."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sqlalchemy import Engine

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
    """

    engine: Engine
    form: Mapping[str, str]
    lists: Mapping[str, list[str]]
    settings: Settings
    who: str


class Refused(Exception):
    """An action cannot be carried out as it was asked for; its text says why, and what to do."""


ActionFunction = Callable[[Action], str]
"""Carries an action out, and returns the path and query of the page that is shown next; or raises ``Refused``."""
