"""The filter that selects dead letters for a list, a redrive or a discard."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from txbox.dead_letters.letter import DeadLetterStatements, Reason
from txbox.errors import InvalidConfiguration
from txbox.messages.destinations import INBOX
from txbox.outbox.outbox import RELAY_SUBSCRIBER
from txbox.outbox.sent_messages import Moment
from txbox.postgres.sqlstates import sqlstate
from txbox.text import storable

LONGEST_AGO = timedelta(days=365_000)
"""Postgres has no times much earlier than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterFilter:
    """Selects dead letters; all given conditions must hold. Without any, all letters that wait.

    Letters that no longer wait for a person are selected only by ``numbers``, or where they are asked for: see
    ``DeadLetters.list``.

    Attributes:
        subscriber_id: letters of this subscriber.
        destination: letters that a relay could not send there, or of ``inbox:SUBSCRIBER``; instead of a subscriber.
        reasons: parked for one of these; empty: for any.
        error: part of the error's text, in upper or lower case.
        since: parked then or later: a time with its zone, or how long ago by the database's clock.
        until: parked before then.
        source: from this queue, by its URL.
        message_ids: of one of these messages; empty: of any.
        headers: with these headers; names in upper or lower case.
        json_path: a JSON path of Postgres that finds something other than false and null in the body as the broker
            delivered it: ``$.customer == 7``, ``$.items[*] ? (@.price > 100)``. A body that Postgres cannot read as
            JSON does not match: see ``LetterOperations.passed_over``.
            https://www.postgresql.org/docs/current/functions-json.html#FUNCTIONS-SQLJSON-PATH
        numbers: of these numbers, whether they wait or not; None: of any.
        up_to: of this number or lower, so that letters parked after a first look are left out.
    """

    subscriber_id: str | None = None
    destination: str | None = None
    reasons: tuple[Reason, ...] = ()
    error: str | None = None
    since: Moment | None = None
    until: Moment | None = None
    source: str | None = None
    message_ids: tuple[str, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    json_path: str | None = None
    numbers: tuple[int, ...] | None = None
    up_to: int | None = None

    def __post_init__(self) -> None:
        if self.subscriber_id is not None and self.destination is not None:
            raise InvalidConfiguration(
                "letters have a subscriber or, from a relay, a destination: give LetterFilter one of the two"
            )
        for name, (is_valid, wanted) in _FIELDS.items():
            if not is_valid(value := getattr(self, name)):
                raise InvalidConfiguration(f"LetterFilter.{name} must be {wanted}, not {value!r}")
        for name in ("since", "until"):
            moment = getattr(self, name)
            if isinstance(moment, datetime) and moment.tzinfo is None:
                raise InvalidConfiguration(f"LetterFilter.{name} needs a zone: {moment} is another moment in each")

    def as_dict(self) -> dict[str, Any]:
        """Return the given conditions as plain values, for the record."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            name: _plain(value) for name, value in given.items() if value is not None and (value or name == "numbers")
        }

    def parameters(self) -> dict[str, Any]:
        """Return the filter as parameters for statements that contain the fragment ``wanted``."""
        subscriber_id, source = self.subscriber_id, self.source
        if self.destination is not None and self.destination.startswith(INBOX):
            subscriber_id, source = self.destination.removeprefix(INBOX), source or self.destination
        elif self.destination is not None:
            subscriber_id = f"{RELAY_SUBSCRIBER}:{self.destination}"
        given = {
            "subscriber_id": subscriber_id,
            "reasons": [Reason(reason).value for reason in self.reasons] or None,
            "error": self.error,
            "since": None if isinstance(self.since, timedelta) else self.since,
            "since_ago": self.since if isinstance(self.since, timedelta) else None,
            "until": None if isinstance(self.until, timedelta) else self.until,
            "until_ago": self.until if isinstance(self.until, timedelta) else None,
            "source": source,
            "message_ids": list(self.message_ids) or None,
            "header_names": [name.lower() for name in self.headers],
            "header_values": list(self.headers.values()),
            "numbers": None if self.numbers is None else list(self.numbers),
            "up_to": self.up_to,
            **({} if self.json_path is None else {"json_path": self.json_path}),
        }
        return {name: _stored(value) for name, value in given.items()}


@contextmanager
def filtered(
    connection: Connection, statements: DeadLetterStatements, which: LetterFilter
) -> Iterator[Callable[[str], str]]:
    """Yield a function that adds the JSON path, if there is one, to a statement with the fragment ``wanted``.

    A function in pg_temp reads the bodies, because only a function can catch the error of a single body. It is gone
    when the transaction ends, committed or not.

    Raises:
        InvalidConfiguration: the JSON path is not valid.
    """
    if which.json_path is None:
        yield lambda statement: statement
        return
    try:
        connection.exec_driver_sql(statements.check_json_path, {"json_path": storable(which.json_path)})
    except DBAPIError as error:
        code = sqlstate(error) or ""
        if code != _SYNTAX_ERROR and not code.startswith(_DATA_EXCEPTION):
            raise
        why = str(error.orig).splitlines()[0]
        raise InvalidConfiguration(f"{which.json_path!r} is not a JSON path as Postgres reads it: {why}") from error
    connection.exec_driver_sql(statements.create_json_function)
    yield lambda statement: statement.replace(statements.wanted, f"{statements.wanted} AND {statements.finds_json}")
    connection.exec_driver_sql(statements.drop_json_function)


def _plain(value: Any) -> Any:
    match value:
        case datetime():
            return value.isoformat()
        case timedelta():
            return f"{value} ago"
        case tuple():
            return [_plain(each) for each in value]
        case Mapping():
            return {storable(name): storable(each) for name, each in value.items()}
    return _stored(value)


def _stored(value: Any) -> Any:
    match value:
        case str():
            return storable(value)
        case list():
            return [_stored(each) for each in value]
    return value


def _is_text(value: object) -> bool:
    return value is None or isinstance(value, str)


def _is_moment(value: object) -> bool:
    if isinstance(value, timedelta):
        return abs(value) <= LONGEST_AGO
    return value is None or isinstance(value, datetime)


def _are(is_valid: Callable[[Any], bool]) -> Callable[[object], bool]:
    # A str is a sequence, too: of single characters.
    return lambda value: isinstance(value, tuple | list) and all(map(is_valid, value))


def _is_number(value: object) -> bool:
    return isinstance(value, int) and 0 <= value < 2**63


_FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("subscriber_id", "destination", "error", "source", "json_path"), (_is_text, "text, or None")),
    "reasons": (_are(lambda each: each in tuple(Reason)), f"a tuple of reasons, {', '.join(Reason)}"),
    **dict.fromkeys(
        ("since", "until"), (_is_moment, f"a datetime, a timedelta of up to {LONGEST_AGO.days:,} days, or None")
    ),
    "message_ids": (_are(lambda each: isinstance(each, str)), "a tuple of texts"),
    "headers": (
        lambda headers: (
            isinstance(headers, Mapping) and all(isinstance(each, str) for pair in headers.items() for each in pair)
        ),
        "a mapping of texts to texts",
    ),
    "numbers": (lambda numbers: numbers is None or _are(_is_number)(numbers), "a tuple of numbers of letters, or None"),
    "up_to": (lambda number: number is None or _is_number(number), "the number of a letter, or None"),
}
"""For each field, what is valid, and how an error says so."""

_SYNTAX_ERROR = "42601"
_DATA_EXCEPTION = "22"
