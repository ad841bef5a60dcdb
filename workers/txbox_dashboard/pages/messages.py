"""The page of one message, as a timeline."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from txbox.outbox.outbox import RELAY_SUBSCRIBER
from txbox.postgres.sql import with_moments
from txbox.postgres.sql_files import SqlFile
from txbox.text import storable
from txbox_dashboard.pages.overview import SUBSCRIBERS, OverviewStatements
from txbox_dashboard.redaction import error_line
from txbox_dashboard.view import Page, Request

SEARCHED = 100_000
"""If the outbox has more messages, a message is not looked up in it: there is no index of ids."""


class MessageStatements(SqlFile, file="messages.sql"):
    published: str
    outbox_rows: str
    sent: str
    recorded: str
    loading: str
    failed: str
    letters: str
    leased: str
    horizons: str


@dataclass(frozen=True, slots=True)
class Happening:
    """One thing that is known of a message.

    Attributes:
        at: the time; None if it is not known.
        what: what happened.
        kind: the kind of its badge: good, warn, bad, or empty.
        where: a subscriber or a destination.
        text: details, in parts that are set apart, as each may run from right to left.
        link: path and query of a page with more; empty if there is none.
        key: the message's key, or None.
    """

    at: datetime | None
    what: str
    kind: str
    where: str
    text: Sequence[str] = ()
    link: str = ""
    link_text: str = ""
    key: str | None = None


def message(request: Request) -> Page:
    """Show everything that is known of an id, across all subscribers."""
    reader = request.reader
    message_id = storable(request.query.get("id", "").strip())
    sql = MessageStatements.load(reader.schema, reader.prefix)
    overview = OverviewStatements.load(reader.schema, reader.prefix)
    known = reader.rows("the subscribers", overview.subscribers, {"most": SUBSCRIBERS}) or ()
    names = [row["subscriber_id"] for row in known]
    asked = {"message_id": message_id, "subscriber_ids": names}
    found: list[Happening] = []

    def rows(what: str, statement: str, *times: str) -> list[dict[str, Any]]:
        return [with_moments(row, *times) for row in reader.rows(what, statement, asked) or ()]

    sizes = reader.rows("the outbox", sql.outbox_rows)
    too_many = bool(sizes) and sizes is not None and sizes[0]["rows"] > SEARCHED
    for one in rows("the outbox", sql.published, "published_at", "due_at") if sizes and not too_many else ():
        found.extend(_published(one, message_id, request))
    found.extend(
        Happening(one["sent_at"], "sent", "good", one["destination"], key=one["key"])
        for one in rows("what was sent", sql.sent, "sent_at")
    )
    for one in rows("the inbox", sql.recorded, "processed_at"):
        found.append(_recorded(one))
        found.extend(_loaded(one, request, sql))
    for one in rows("its failures", sql.failed, "first_failed_at", "last_failed_at"):
        found.extend(_failed(one, message_id, request))
    for one in rows("its dead letters", sql.letters, "parked_at", "redriven_at", "discarded_at"):
        found.extend(_parked(one, message_id, request))
    for one in rows("its leases", sql.leased, "acquired_at", "expires_at", "completed_at"):
        found.extend(_leased(one))
    horizons = [with_moments(row, "horizon") for row in reader.rows("horizons", sql.horizons) or ()]
    more_subscribers = len(names) == SUBSCRIBERS
    never = [*([] if too_many else ["published"]), *([] if more_subscribers else ["processed", "parked", "leased"])]
    in_order = sorted(found, key=lambda one: one.at or datetime.min.replace(tzinfo=UTC))
    return Page(
        "message.html",
        {
            "message_id": message_id,
            "found": in_order,
            "too_many": too_many,
            "horizons": horizons,
            "subscribers": len(names),
            "more_subscribers": more_subscribers,
            "never": never,
        },
    )


def _published(one: Mapping[str, Any], message_id: str, request: Request) -> Sequence[Happening]:
    happened = [Happening(one["published_at"], "published, waits", "warn", one["destination"], key=one["key"])]
    if one["attempts"]:
        error = error_line(request.settings, one["error"] or "", message_id, one["destination"])
        text = (f"{one['attempts']} times:", error)
        happened.append(Happening(None, "refused by the broker", "bad", one["destination"], text))
    elif one["held"]:
        happened.append(
            Happening(None, "held", "warn", one["destination"], ("a message of its key before it was refused",))
        )
    elif one["due_at"] is not None:
        happened.append(Happening(one["due_at"], "is due", "", one["destination"]))
    return happened


def _recorded(one: Mapping[str, Any]) -> Happening:
    name, number = one["subscriber_id"], one["dead_letter_id"]
    if number is None:
        return Happening(one["processed_at"], "processed", "good", name)
    return Happening(
        one["processed_at"], "recorded as parked", "bad", name, (), f"/letter?number={number}", f"dead letter {number}"
    )


def _loaded(one: Mapping[str, Any], request: Request, sql: MessageStatements) -> Sequence[Happening]:
    if one["processed_at"] is None or one["dead_letter_id"] is not None:
        return ()
    values = {"subscriber_id": one["subscriber_id"], "moment": one["processed_at"]}
    return [
        Happening(
            one["processed_at"],
            "a bulk load was running",
            "",
            one["subscriber_id"],
            ("of", load["source"], "which may have applied it"),
            f"/loads?run={load['run_id']}",
            f"run {load['run_id']}",
        )
        for load in request.reader.rows("bulk loads", sql.loading, values) or ()
    ]


def _failed(one: Mapping[str, Any], message_id: str, request: Request) -> Sequence[Happening]:
    name = one["subscriber_id"]
    error = error_line(request.settings, one["error"], message_id, name)
    waits = f"waits for another attempt, {one['attempts']} counted"
    return [Happening(one["last_failed_at"], waits, "warn", name, (error,)), *_attempts(one, message_id, request)]


def _attempts(one: Mapping[str, Any], message_id: str, request: Request) -> Sequence[Happening]:
    """Return the counted attempts of a failure or a letter."""
    name = one["subscriber_id"]
    where = name.removeprefix(f"{RELAY_SUBSCRIBER}:")
    happened = []
    for each in one["history"]:
        error = error_line(request.settings, str(each.get("error", "")), message_id, name)
        happened.append(
            Happening(_read(each.get("at")), f"failed, delivery {each.get('delivery')}", "bad", where, (error,))
        )
    return happened


def _read(at: object) -> datetime | None:
    try:
        read = datetime.fromisoformat(str(at))
    except ValueError:
        return None
    return read if read.tzinfo is not None else None


def _parked(one: Mapping[str, Any], message_id: str, request: Request) -> Sequence[Happening]:
    name, number = one["subscriber_id"], one["dead_letter_id"]
    where = name.removeprefix(f"{RELAY_SUBSCRIBER}:")
    link, text = f"/letter?number={number}", f"dead letter {number}"
    error = error_line(request.settings, one["error"], message_id, name)
    happened = [*_attempts(one, message_id, request)]
    parked = f"parked: {one['reason']}"
    happened.append(Happening(one["parked_at"], parked, "bad", where, (error,), link, text, one["order_key"]))
    for what in ("redriven", "discarded"):
        if one[f"{what}_at"] is not None:
            by = ("by", one[f"{what}_by"]) if one[f"{what}_by"] else ()
            happened.append(Happening(one[f"{what}_at"], what, "warn", where, by, link, text))
    return happened


def _leased(one: Mapping[str, Any]) -> Sequence[Happening]:
    name, owner = one["subscriber_id"], ("by", one["owner"], f"fence {one['fence']}, attempt {one['attempts']}")
    happened = [Happening(one["acquired_at"], "lease acquired", "", name, owner)]
    if one["completed_at"] is not None:
        happened.append(Happening(one["completed_at"], "completed", "good", name))
    elif one["expires_at"] is None:
        happened.append(Happening(None, "free, for another attempt", "warn", name))
    else:
        what, kind = ("lease has run out", "bad") if one["expired"] else ("lease runs out", "")
        happened.append(Happening(one["expires_at"], what, kind, name))
    return happened
