"""The order of a key across its dead letters: with ``ordered=True``, no message of a key overtakes a parked one.

A key is a message's FIFO group, or else its ``key`` header. A letter *holds* its key from when it is parked until its
message is processed, in whatever way, or the letter is discarded. A message of a held key does not run::

    m1 fails for the last time ── parked: holds the key
    m2 ── records ── the key is held by m1 ── ROLLBACK ── parked behind m1
    redrive: m1, then m2 ── sent in the order of their places
    m3, which was in the queue already ── the key is held by m1, on its way ── parked behind m2
    copy of m1 ── the first of its key: runs ── COMMIT takes its place away
    copy of m2 ── the first of its key: runs

A place is the number of the message's first letter. So a message that fails once more still comes before those
that were parked behind it::

    copy of m1 fails for the last time ── parked anew, under a new number, with m1's place
    copy of m2 ── m1 waits before it ── parked anew, with m2's place

A copy that arrives before those sent earlier, as a standard queue may deliver it, is handed back, and comes again.

The check runs after the message is recorded, in the same transaction, with a snapshot no older than the transaction's
begin at every isolation level. So this holds: **a message does not run if its transaction begins after a letter of its
key was committed.** In a FIFO group that covers every later message, as the broker hands it out after the ack, which
comes after the commit. If two workers have the same messages of a group (a visibility timeout has expired), the primary
key of the inbox orders them::

    A parks m1 ─────────── commits
         B has m1 and m2: records m1 … waits for A ── asks: the key is held          (READ COMMITTED: a new snapshot)
                                                   ── 40001: B begins again          (REPEATABLE READ, SERIALIZABLE)

Messages of a key in a standard queue run side by side and in any order. There, a message whose transaction began before
the letter was committed may commit after it. We take no lock for that, because it breaks no order that existed.

A redrive marks a letter in the transaction that sends its copy, and the send comes last, so others see the letter wait
until its copy is on its way. It holds its key all that time: a newer message that is recorded in between is parked.

Where the inbox forgets, it may forget the processed message of a redriven letter before anyone saw that the letter was
done (for example, if a bulk load processed it). So a letter redriven before the subscriber's horizon holds nothing.
"""

import hashlib
from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import Connection

from txbox.messages.message import HEADER_EVENTBRIDGE_KEY, HEADER_FIRST_DELIVERY_ID, HEADER_KEY
from txbox.postgres.driver_cursor import run
from txbox.postgres.sql_files import SqlFile
from txbox.postgres.transactions import check_table
from txbox.text import storable

MAX_KEY_BYTES = 1_000
"""In UTF-8. A longer key is kept as its SHA-256, because the key is part of an index."""


class KeyHeld(Exception):
    """A message must not run now: an earlier dead letter holds its key.

    Attributes:
        is_copy: the message is the copy of a letter, and the copies of earlier letters are on their way, so another
            delivery may find those processed. Otherwise the message has to be parked.
    """

    def __init__(self, order_key: str, dead_letter_id: int, *, is_copy: bool) -> None:
        self.is_copy = is_copy
        super().__init__(
            f"its key {order_key!r} is held by dead letter {dead_letter_id}, whose message is not processed; redrive "
            "or discard that one first"
        )


class OrderStatements(SqlFile, file="order.sql"):
    heads: str
    place_of: str
    give_up_places: str
    take_place: str
    hand_over_place: str
    find_before: str
    held_keys: str
    held_by_operation: str
    follow: str


class HeldKeys:
    """Which keys of one subscriber are held. Each method works in the transaction that recorded the messages."""

    def __init__(self, subscriber_id: str, *, schema: str | None = None, prefix: str = "") -> None:
        self._subscriber_id = subscriber_id
        self._statements = OrderStatements.load(schema, prefix)

    def check(self, connection: Connection) -> None:
        """Raise ``SchemaMissing`` unless the tables exist in this version."""
        check_table(connection, self._statements.tables.dead_letter)
        check_table(connection, self._statements.tables.inbox_horizon)

    def require_free(self, connection: Connection, order_keys: Collection[str]) -> None:
        """Raise ``KeyHeld`` if any letter holds one of these keys; one statement for all of them."""
        for key, dead_letter_id, _ in self._heads(connection, order_keys):
            raise KeyHeld(key, dead_letter_id, is_copy=False)

    def enter(self, connection: Connection, key: str, message_id: str, headers: Mapping[str, str]) -> None:
        """Return if no earlier letter holds the message's key.

        If the message is the copy of the key's first letter, that letter gives up its place in this transaction.

        Raises:
            KeyHeld: the message must not run; roll back.
        """
        heads = self._heads(connection, [key])
        if not heads:
            return
        ((_, dead_letter_id, first_id),) = heads
        ids = ids_of(message_id, headers)
        own = {"subscriber_id": self._subscriber_id, "message_ids": ids, "order_key": key}
        if first_id in ids:
            run(connection, self._statements.give_up_places, own)
            return
        place = run(connection, self._statements.place_of, own).fetchone()
        raise KeyHeld(key, dead_letter_id, is_copy=place is not None and not place[0])

    def _heads(self, connection: Connection, order_keys: Collection[str]) -> list[Any]:
        asked = {"subscriber_id": self._subscriber_id, "order_keys": sorted(order_keys)}
        return list(run(connection, self._statements.heads, asked).fetchall())


def order_key(group: str | None, headers: Mapping[str, str]) -> str | None:
    """Return the key whose order a message keeps, in a form that fits an index; None if it keeps none.

    Args:
        group: the message's FIFO group; None where there is no order.
        headers: the message's headers.
    """
    key = group or headers.get(HEADER_KEY) or headers.get(HEADER_EVENTBRIDGE_KEY)
    if not key:
        return None
    key = storable(key)
    encoded = key.encode()
    return key if len(encoded) <= MAX_KEY_BYTES else f"sha256:{hashlib.sha256(encoded).hexdigest()}"


def ids_of(message_id: str, headers: Mapping[str, str]) -> list[str]:
    """Return the ids a message's letters may have: its own, and the one it had before it could be read."""
    first = headers.get(HEADER_FIRST_DELIVERY_ID)
    return [message_id] if first is None else [message_id, storable(first)]
