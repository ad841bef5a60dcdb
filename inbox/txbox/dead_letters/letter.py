"""A dead letter, how it maps to its row, and the statements about such rows. No I/O."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import RowMapping

from txbox.dead_letters.failures import MAX_ERROR_CHARACTERS, History
from txbox.dead_letters.order import OrderStatements
from txbox.messages.message import fingerprint
from txbox.postgres.sql import with_moments
from txbox.postgres.sql_files import SqlFile
from txbox.text import storable


class DeadLetterStatements(SqlFile, file="dead_letters.sql", fragments_of=OrderStatements):
    park: str
    mark_parked: str
    mark_expired: str
    find_recorded: str
    await_redrive: str
    unmark_parked: str
    mark_others_mismatch: str
    waits_parked: str
    lease_attempts: str
    wanted: str
    finds_json: str
    check_json_path: str
    create_json_function: str
    drop_json_function: str
    letters: str
    passed_over: str
    matching_counts: str
    store_operation: str
    store_selection: str
    operations: str
    next_selected: str
    lock_selected: str
    record_outcome: str
    retry_failed: str
    finish_operation: str
    letter_of: str
    lock_letters: str
    mark_redriven: str
    mark_discarded: str
    letter_counts: str


class Reason(StrEnum):
    """Why a message was parked."""

    FAILED = "failed"
    """Its handler raised, ``max_attempts`` times."""
    MISMATCH = "mismatch"
    """Its id was processed, is parked, or is being processed with another body."""
    MALFORMED = "malformed"
    """It could not be parsed as its envelope requires."""
    CRASHED = "crashed"
    """The process ended in its last attempt; ``history`` has all of them."""
    EXPIRED = "expired"
    """It is too old to tell whether it was processed, and was not run."""
    BEHIND = "behind"
    """It was not run, because an earlier letter holds its key (``ordered=True``)."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A parked message.

    Attributes:
        subscriber_id: whose attempts failed.
        message_id: the message's id.
        reason: why it was parked.
        error: the last error, as text.
        attempts: how many counted: the handler failed, or the process died.
        source: where it came from, such as a queue's URL; a redrive sends it there.
        body: as the broker delivered it, envelopes and all.
        headers: the message's headers.
        envelope: what the broker needs to send it again, such as attributes and the FIFO group.
        dead_letter_id: its number; None before it is parked.
        parked_at: by the database's clock.
        redriven_at: when it was sent through again; None if it was not.
        redriven_by: who had it sent.
        discarded_at: when it was given up; None if it was not.
        discarded_by: who gave it up.
        note: why.
        processed_since: its message was processed after it was parked, so it no longer waits for a person.
        history: the last attempts that counted, oldest first: ``at`` (the database's clock), ``delivery`` (the broker's
            receive count) and ``error`` of each.
        order_key: the FIFO group, or the key, whose order it keeps; None: it keeps none.
        order_position: its place among the letters of its key; None: it does not hold the key, or no longer does.
        body_size: of the whole body, in bytes, as ``body`` may be a part of it; None before it is parked.
    """

    subscriber_id: str
    message_id: str
    reason: Reason
    error: str
    attempts: int
    source: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    envelope: Mapping[str, Any] = field(default_factory=dict)
    dead_letter_id: int | None = None
    parked_at: datetime | None = None
    redriven_at: datetime | None = None
    redriven_by: str | None = None
    discarded_at: datetime | None = None
    discarded_by: str | None = None
    note: str | None = None
    processed_since: bool = False
    history: History = ()
    order_key: str | None = None
    order_position: int | None = None
    body_size: int | None = None


def key_of(letter: DeadLetter) -> dict[str, Any]:
    """Return a letter's subscriber and message, as parameters of a statement."""
    return {"subscriber_id": letter.subscriber_id, "message_id": letter.message_id}


def columns_of(letter: DeadLetter) -> dict[str, Any]:
    """Return a letter to park, as parameters of a statement."""
    return {
        **key_of(letter),
        "reason": letter.reason.value,
        "error": storable(letter.error)[:MAX_ERROR_CHARACTERS],
        "attempts": letter.attempts,
        "source": letter.source,
        "body": letter.body,
        "body_hash": fingerprint(letter.body),
        "headers": json.dumps(_storable(letter.headers)),
        "envelope": json.dumps(_storable(letter.envelope)),
        "history": json.dumps(list(letter.history)),
        "order_key": letter.order_key,
    }


def letter_from(row: RowMapping) -> DeadLetter:
    """Return the letter of a row whose columns are named as the attributes."""
    changed = {"reason": Reason(row["reason"]), "body": bytes(row["body"]), "history": tuple(row["history"])}
    return DeadLetter(**{**with_moments(row, "parked_at", "redriven_at", "discarded_at"), **changed})


def _storable(value: Any) -> Any:
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, Mapping):
        return {storable(name): _storable(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_storable(inner) for inner in value]
    return value
