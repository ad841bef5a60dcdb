"""Finds the letters of a filter, one range of numbers at a time, for as long as a page may take."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from txbox import Reason
from txbox.dead_letters import LetterFilter
from txbox.dead_letters.letter import DeadLetterStatements
from txbox.errors import InvalidConfiguration
from txbox.outbox.outbox import RELAY_SUBSCRIBER
from txbox.postgres.sql import with_moments
from txbox.postgres.sql_files import SqlFile
from txbox.text import storable
from txbox_dashboard.reader import Reader

STRETCH = 1000
"""Letters read at a time."""

SEARCH_SECONDS = 0.06
"""After this time no further read begins: a page should take a tenth of a second."""

NEWEST = 2**62
"""A number higher than any letter's."""


class LetterStatements(SqlFile, file="letters.sql", fragments_of=DeadLetterStatements):
    newest: str
    of_numbers: str
    counts_of_numbers: str
    edge: str
    in_stretch: str
    counts_in_stretch: str
    count_of_subscriber: str
    of_subscriber: str
    counts_of_subscriber: str
    values: str
    one_letter: str
    operations_of: str
    last_operations: str


@dataclass(frozen=True, slots=True)
class FoundLetters:
    """Letters of a filter.

    Attributes:
        letters: one line each, the newest first.
        looked_to: every letter with a higher number was read, down to this one.
        next_before: where to continue; None if there is nothing more, or nothing was read.
    """

    letters: Sequence[dict[str, Any]]
    looked_to: int | None
    next_before: int | None


def find(reader: Reader, which: LetterFilter, *, every: bool, before: int, page: int) -> FoundLetters:
    """Return letters of a filter with numbers below ``before``, the newest first.

    Args:
        every: include letters that no longer wait.
        page: the most letters to return.
    """
    sql = LetterStatements.load(reader.schema, reader.prefix)
    parameters = {**which.parameters(), "all": every, "stretch": STRETCH}
    statement = _by_key(reader, sql, which, parameters, every=every)
    if statement is not None:
        rows = reader.rows("dead letters", statement.letters, {**statement.asked, "before": before, "page": page})
        found = [_line(row) for row in rows or ()]
        last = found[-1]["dead_letter_id"] if len(found) == page else None
        return FoundLetters(found, None, next_before=last)
    found = []
    while True:
        asked = {**parameters, "before": before, "page": page - len(found)}
        edges = reader.rows("dead letters", sql.edge, asked)
        if edges is not None and edges[0]["lowest"] is None:
            return FoundLetters(found, None, next_before=None)
        rows = None if edges is None else reader.rows("dead letters", sql.in_stretch, asked)
        if edges is None or rows is None:  # not read in time: the next search begins with the same range
            looked_to = before if before < NEWEST else None
            return FoundLetters(found, looked_to, next_before=looked_to)
        found += [_line(row) for row in rows]
        if len(found) == page:
            last = found[-1]["dead_letter_id"]
            return FoundLetters(found, last, next_before=last)
        before = edges[0]["lowest"]
        if edges[0]["letters"] < STRETCH:
            return FoundLetters(found, None, next_before=None)
        if reader.seconds > SEARCH_SECONDS:
            return FoundLetters(found, before, next_before=before)


def count(reader: Reader, which: LetterFilter) -> tuple[Mapping[tuple[str, str], int], bool]:
    """Count a filter's waiting letters by subscriber and reason. Return also whether all were counted."""
    sql = LetterStatements.load(reader.schema, reader.prefix)
    parameters = {**which.parameters(), "all": False, "stretch": STRETCH}
    counts: dict[tuple[str, str], int] = {}

    def add(statement: str, asked: Mapping[str, Any]) -> bool:
        """Add what a statement counts. Return whether it finished in time."""
        rows = reader.rows("dead letters", statement, asked)
        for row in rows or ():
            of = (row["subscriber_id"], row["reason"])
            counts[of] = counts.get(of, 0) + row["letters"]
        return rows is not None

    statement = _by_key(reader, sql, which, parameters, every=False)
    if statement is not None:
        return counts, add(statement.counts, statement.asked)
    before = NEWEST
    while True:
        asked = {**parameters, "before": before}
        edges = reader.rows("dead letters", sql.edge, asked)
        if edges is not None and edges[0]["lowest"] is None:
            return counts, True
        if edges is None or not add(sql.counts_in_stretch, asked):
            return counts, False
        before = edges[0]["lowest"]
        if edges[0]["letters"] < STRETCH:
            return counts, True
        if reader.seconds > SEARCH_SECONDS:
            return counts, False


def values_of(reader: Reader) -> Mapping[str, Sequence[str]]:
    """Return values that a filter's fields may have, for people to choose from."""
    sql = LetterStatements.load(reader.schema, reader.prefix)
    rows = reader.rows("what filters suggest", sql.values, {"stretch": STRETCH}) or ()
    found: dict[str, list[str]] = {"subscriber": [], "destination": [], "source": []}
    for row in rows:
        destination = row["value"].removeprefix(f"{RELAY_SUBSCRIBER}:")
        is_destination = row["field"] == "subscriber" and destination != row["value"]
        found["destination" if is_destination else row["field"]].append(destination if is_destination else row["value"])
    return found


def newest(reader: Reader) -> int | None:
    """Return the highest number of a letter, or None if it was not read in time."""
    rows = reader.rows("dead letters", LetterStatements.load(reader.schema, reader.prefix).newest)
    return None if rows is None else int(rows[0]["number"])


@dataclass(frozen=True, slots=True)
class _Key:
    """Statements that find letters without a search, and their parameters."""

    letters: str
    counts: str
    asked: Mapping[str, Any]


def _by_key(
    reader: Reader, sql: LetterStatements, which: LetterFilter, parameters: Mapping[str, Any], *, every: bool
) -> _Key | None:
    if which.numbers is not None:
        return _Key(sql.of_numbers, sql.counts_of_numbers, {**parameters, "chosen": list(which.numbers)})
    if every or parameters["subscriber_id"] is None:
        return None
    rows = reader.rows("dead letters", sql.count_of_subscriber, parameters)
    if rows is None or rows[0]["letters"] >= STRETCH:
        return None
    return _Key(sql.of_subscriber, sql.counts_of_subscriber, parameters)


def _line(row: Any) -> dict[str, Any]:
    return with_moments(row, "parked_at", "redriven_at", "discarded_at")


def filter_of(given: Mapping[str, str], *, errors_hidden: bool) -> LetterFilter:
    """Return a form's filter.

    Args:
        given: the form's fields.
        errors_hidden: errors are redacted. A filter by error would reveal them by what it finds and what it does not.

    Raises:
        InvalidConfiguration: a field cannot be read, or is not allowed. The text says which.
    """
    values = {name: storable(text.strip()) for name, text in given.items() if text.strip()}
    if errors_hidden and "error" in values:
        raise InvalidConfiguration("errors are redacted here, so no filter looks into them; the command has one")
    reason = values.get("reason")
    if reason is not None and reason not in list(Reason):
        raise InvalidConfiguration(f"there is no reason {reason!r}; there are {', '.join(Reason)}")
    return LetterFilter(
        subscriber_id=values.get("subscriber"),
        destination=values.get("destination"),
        reasons=(Reason(reason),) if reason else (),
        error=values.get("error"),
        since=_moment("since", values),
        until=_moment("until", values),
        source=values.get("source"),
        message_ids=(values["message"],) if "message" in values else (),
        numbers=_numbers(values["numbers"]) if "numbers" in values else None,
        up_to=max(_numbers(values["up_to"]), default=None) if "up_to" in values else None,
    )


FIELDS = ("subscriber", "destination", "reason", "error", "since", "until", "source", "message", "numbers", "up_to")
"""A filter's fields in forms and URLs. None concerns headers or bodies: they may be hidden, and belong in no URL."""


def _moment(name: str, values: Mapping[str, str]) -> datetime | None:
    if name not in values:
        return None
    try:
        at = datetime.fromisoformat(values[name])
    except ValueError as error:
        raise InvalidConfiguration(f"{name}: {values[name]!r} is no time, such as 2026-03-01T08:00") from error
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)


def _numbers(text: str) -> tuple[int, ...]:
    parts = [part for part in text.replace(" ", "").split(",") if part]
    if not all(part.isascii() and part.isdigit() and len(part) < _DIGITS for part in parts):
        raise InvalidConfiguration(f"{text!r} is no list of letters' numbers")
    return tuple(dict.fromkeys(map(int, parts)))


_DIGITS = 19
