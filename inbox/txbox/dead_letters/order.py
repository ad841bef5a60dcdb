"""The order of a key over its dead letters: with ``ordered=True``, nothing of a key overtakes one that is parked.

A key is a message's FIFO group, or else its ``key`` header. A letter *holds* its key from its parking on, until its
message is processed, by whatever way, or the letter is discarded. A message of a key that is held is not run::

    m1 fails for the last time ── parked: holds the key
    m2 ── records ── the key is held by m1 ── ROLLBACK ── parked behind m1
    redrive: m1, then m2 ── sent in the order of their places
    m3, which was in the queue already ── the key is held by m1, on its way ── parked behind m2
    copy of m1 ── the first of its key: runs ── COMMIT takes its place away
    copy of m2 ── the first of its key: runs

A place is the number of the first letter that a message had, so a message that fails once more comes before those that
were parked behind it::

    copy of m1 fails for the last time ── parked anew, under a new number, with m1's place
    copy of m2 ── m1 waits before it ── parked anew, with m2's place

A copy that comes before those sent before it, as a standard queue may deliver it, is handed back, and comes again.

The question is asked after the message is recorded, in the same transaction, whose snapshot is younger than the
transaction's begin at every isolation level. So what holds is: **a message whose transaction begins after a letter of
its key was committed is not run.** In a FIFO group that is every later one, as the broker hands it out after the ack,
which comes after the commit. Where two workers have the same messages of a group (a visibility has ended), the primary
key of the inbox orders them::

    A parks m1 ─────────── commits
         B has m1 and m2: records m1 … waits for A ── asks: the key is held          (READ COMMITTED: a new snapshot)
                                                   ── 40001: B begins again          (REPEATABLE READ, SERIALIZABLE)

Messages of a key in a standard queue are run side by side and in any order. There, one whose transaction had begun
before the letter was committed may commit after it; no lock is taken for it, because no order was broken that had been
there.

A redrive marks a letter in the transaction that sends its copy, which is done last, so a letter seen from outside waits
until its copy is on its way. It holds its key all the time: a newer message that is recorded between the two is parked.

Where the inbox forgets, the processed message of a redriven letter may be forgotten before the letter was seen to be
done (a bulk load has processed it). So a letter that was redriven before the subscriber's horizon holds nothing.
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

__all__ = ["HeldKeys", "KeyHeld", "OrderStatements", "ids_of", "order_key"]

MAX_KEY_BYTES = 1_000
"""In UTF-8. A longer key is kept as its SHA-256: it is a part of an index."""


class KeyHeld(Exception):
    """A message is not to be run now: a dead letter before it holds its key.

    Attributes:
        is_copy: it is the copy of a letter, and those before it are on their way, too; another delivery may find them
            processed. Otherwise it is to be parked.
    """

    def __init__(self, order_key: str, dead_letter_id: int, *, is_copy: bool) -> None:
        self.is_copy = is_copy
        super().__init__(
            f"its key {order_key!r} is held by dead letter {dead_letter_id}, whose message is not processed; redrive "
            "or discard that one first"
        )


class OrderStatements(SqlFile, file="order.sql"):
    """The statements of ``order.sql``."""

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
    """Which keys of one subscriber are held; each method works in the transaction that has recorded the messages."""

    def __init__(self, subscriber_id: str, *, schema: str | None = None, prefix: str = "") -> None:
        """Name the subscriber, and where the tables are: as for its inbox."""
        self._subscriber_id = subscriber_id
        self._statements = OrderStatements.load(schema, prefix)

    def check(self, connection: Connection) -> None:
        """Check that the tables are there, and of this version; raises ``SchemaMissing`` if they are not."""
        check_table(connection, self._statements.tables.dead_letter)
        check_table(connection, self._statements.tables.inbox_horizon)

    def require_free(self, connection: Connection, order_keys: Collection[str]) -> None:
        """Raise ``KeyHeld`` if one of these keys is held, by whatever letter; one statement for all of them."""
        for key, dead_letter_id, _ in self._heads(connection, order_keys):
            raise KeyHeld(key, dead_letter_id, is_copy=False)

    def enter(self, connection: Connection, key: str, message_id: str, headers: Mapping[str, str]) -> None:
        """Let a message go on if no letter before it holds its key.

        If it is the copy of the key's first letter, that one gives up its place in this transaction.

        Raises:
            KeyHeld: it must not be run; roll back.
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
    """Return the key whose order a message keeps, in a form that an index can hold; None: it keeps none.

    Args:
        group: the message's FIFO group; None where there is no order.
        headers: the message's.
    """
    key = group or headers.get(HEADER_KEY) or headers.get(HEADER_EVENTBRIDGE_KEY)
    if not key:
        return None
    key = storable(key)
    encoded = key.encode()
    return key if len(encoded) <= MAX_KEY_BYTES else f"sha256:{hashlib.sha256(encoded).hexdigest()}"


def ids_of(message_id: str, headers: Mapping[str, str]) -> list[str]:
    """Return the ids under which a message's letters may be: its own, and the one it had before it could be read."""
    first = headers.get(HEADER_FIRST_DELIVERY_ID)
    return [message_id] if first is None else [message_id, storable(first)]
