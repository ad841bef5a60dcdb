"""A ledger in Postgres: a row per message, and one statement per step that commits by itself.

The database decides by its own clock whether a lease has run out, in the statement that takes the lease over. The owner
only measures how long ago it asked (see ``txbox.leases.lease``). So the wall clocks of the owners' machines do not
matter. If the database's own clock is set, a ledger notices what it can (``txbox.leases.server_clock``). If it is set
forward, the ledger takes nothing over by the new time for the length of one lease. If it is set back, a lease that
lasts longer than it was asked for is shortened to its length from now.

These statements are never part of the caller's transaction: others must see a lease before the work begins, and an
attempt counts even if the work fails. Effects that a transaction covers need no lease: use an inbox.
"""

import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from txbox.backoff import Backoff, retry
from txbox.errors import Expired, InvalidConfiguration, LedgerError
from txbox.inbox.age_judge import AgeJudge, UnknownAge
from txbox.leases.lease import (
    LEASE_SECONDS,
    Acquisition,
    AttemptEnd,
    Lease,
    LeaseRecord,
    LeaseState,
    acquisition_from,
    elapsed,
    owner,
    valid_lease_seconds,
)
from txbox.leases.server_clock import TOLERANCE_SECONDS, ServerClock
from txbox.messages.message import valid_message_id, valid_subscriber_id
from txbox.postgres.engines import adopt, require_server, retry_on_new_connections
from txbox.postgres.sql_files import SqlFile
from txbox.postgres.sqlstates import PREPARED_REMEDY, is_lost_prepared_statement, is_outage, is_retryable, sqlstate
from txbox.postgres.transactions import missing_schema
from txbox.postgres.watchdog import bounded

SILENT_PART = 1 / 6
"""Part of a lease's length: how long the database may be silent before it is probed, and how long after that.

A renewal that one silent connection holds up is tried again on others while the lease lasts.
"""

STATEMENT_RUNS = 6
"""How often a statement is run that Postgres gave up because of another, before that counts as an error."""

STATEMENT_BACKOFF = Backoff(first_seconds=0.01, longest_seconds=0.5)
"""The delay between these runs; needed if the server's default is REPEATABLE READ or higher."""


T = TypeVar("T")


class LeaseStatements(SqlFile, file="leases.sql"):
    acquire: str
    acquire_by_clock: str
    read_timeline: str
    renew: str
    shorten: str
    complete: str
    release: str
    counts: str


class PostgresLedger:
    """The leases of one subscriber's messages, in the table ``message_lease``. Implements ``Ledger``."""

    def __init__(
        self,
        subscriber_id: str,
        *,
        engine: Engine,
        schema: str | None = None,
        prefix: str = "",
        unknown_age: UnknownAge = "process",
    ) -> None:
        """Store the subscriber and where the table is; nothing is connected.

        Args:
            subscriber_id: the consumer's name; each subscriber processes a message once.
            engine: the database; each step uses one of its connections for one round trip.
            schema: the Postgres schema that holds the tables; None leaves it to the search path.
            prefix: what the tables' names start with.
            unknown_age: what becomes of a message of unknown age once the subscriber forgets, as for an ``Inbox``.

        Raises:
            InvalidConfiguration: an argument cannot work.
        """
        if not isinstance(engine, Engine) or engine.dialect.is_async:
            raise InvalidConfiguration(
                f"PostgresLedger.engine must be an SQLAlchemy Engine, not {type(engine).__name__}; create_engine(url) "
                "makes one, also beside coroutines: leases are renewed by threads"
            )
        self._subscriber_id = valid_subscriber_id(subscriber_id, "PostgresLedger.subscriber_id")
        self._ages = AgeJudge(
            self._subscriber_id, schema=schema, prefix=prefix, unknown_age=unknown_age, of="PostgresLedger"
        )
        self.schema = schema
        self.prefix = prefix
        self._engine = adopt(engine)
        self._statements = LeaseStatements.load(schema, prefix)
        self._acquire = self._statements.acquire
        self._table = self._statements.name_of("message_lease")
        self._clock = ServerClock()

    def __repr__(self) -> str:
        return f"PostgresLedger({self._subscriber_id!r})"

    @property
    def subscriber_id(self) -> str:
        """The consumer's name."""
        return self._subscriber_id

    def check(self) -> None:
        """Raise unless a lease could be acquired: acquire one and roll back; see ``Ledger``."""
        parameters = self._asking(f"check {uuid.uuid4()}", LEASE_SECONDS, None)

        def begin(connection: Connection) -> None:
            require_server(connection)
            connection.execution_options(isolation_level="READ COMMITTED")
            connection.exec_driver_sql(self._acquire, parameters)
            connection.rollback()

        def ask() -> None:
            with self._translated():
                retry_on_new_connections(self._engine, begin)

        self._with_or_without_timeline(ask)

    def acquire(
        self, message_id: str, *, lease_seconds: float = LEASE_SECONDS, fingerprint: bytes | None = None
    ) -> Acquisition:
        """Ask for the lease of a message; see ``Ledger``. One round trip."""
        lease_seconds = valid_lease_seconds(lease_seconds)
        parameters = self._asking(valid_message_id(message_id), lease_seconds, fingerprint)
        for run in range(1, STATEMENT_RUNS + 1):
            asked_at = elapsed()
            parameters["latest"] = self._clock.latest(asked_at)
            with bounded(lease_seconds * SILENT_PART):
                _, row = self._with_or_without_timeline(lambda: self._run(self._acquire, parameters))
            if row is not None:
                self._observe(row[3], asked_at, lease_seconds)
            if row is not None and row[1] is not None:
                fence, attempts, unknown = row[:3]
                lease = Lease(
                    self._subscriber_id,
                    message_id,
                    fence=fence,
                    attempt=attempts,
                    unknown_attempts=unknown,
                    lease_seconds=lease_seconds,
                    asked_at=asked_at,
                )
                return Acquisition(LeaseState.ACQUIRED, lease)
            if row is not None and (
                acquisition := acquisition_from(_record(row), self._subscriber_id, message_id, fingerprint)
            ):
                length = row[6]
                if length is not None and acquisition.seconds_left > length + TOLERANCE_SECONDS:
                    return self._shortened(message_id, row[0], length, acquisition.seconds_left)
                return acquisition
            # The snapshot was older than what the statement conflicted with; rare, and hardly ever twice.
            time.sleep(STATEMENT_BACKOFF.seconds(run))
        return Acquisition(LeaseState.IN_FLIGHT)

    def find_expired(self, lease: Lease, sent_at: datetime | None) -> Expired | None:
        """Return the error for a message that is too old to judge; None if its work may begin.

        Call it only with a lease before which no attempt is known to have failed. A maintainer forgets completed leases
        as it forgets ids, and this statement is later than the one that acquired the lease (see
        ``txbox.inbox.age_judge``).

        Args:
            lease: of the message.
            sent_at: as in ``Message.sent_at``; None: unknown, unless the id contains it.

        Raises:
            LedgerError: the store cannot be reached, or refuses.
        """
        # The latest the server's time can be: better one statement too many.
        now = self._clock.latest(elapsed()) or time.time()
        old = self._ages.old({lease.message_id: sent_at}, int(now * 1_000_000))
        if not old:
            return None

        def judge(connection: Connection) -> Expired | None:
            connection.execution_options(isolation_level="AUTOCOMMIT")
            return self._ages.judge(connection, old)

        with self._translated():
            return retry_on_new_connections(self._engine, judge)

    def renew(self, lease: Lease, *, lease_seconds: float | None = None) -> None:
        """Extend a lease from now on; see ``Ledger``. One round trip."""
        lease_seconds = valid_lease_seconds(lease.lease_seconds if lease_seconds is None else lease_seconds)
        asked_at = elapsed()
        row = self._settle(self._statements.renew, lease, lease_seconds=lease_seconds)
        self._observe(row[0], asked_at, lease_seconds)
        lease.mark_renewed(lease_seconds, asked_at)

    def complete(self, lease: Lease, result: bytes | None = None) -> None:
        """Record, for good, that the work is done; see ``Ledger``. One round trip."""
        self._settle(self._statements.complete, lease, result=result)
        lease.mark_ended()

    def release(self, lease: Lease, ended: AttemptEnd = AttemptEnd.FAILED, *, forget_attempts: bool = False) -> None:
        """Record that the attempt has not completed the message; see ``Ledger``. One round trip."""
        self._settle(
            self._statements.release,
            lease,
            attempts=-int(ended in (AttemptEnd.NOT_MADE, AttemptEnd.NOT_COUNTED)),
            failures=int(ended is AttemptEnd.FAILED),
            uncounted=int(ended is AttemptEnd.NOT_COUNTED),
            forget=forget_attempts,
            unknown_now=lease.unknown_attempts + (ended in (AttemptEnd.UNKNOWN, AttemptEnd.NOT_COUNTED)),
        )
        lease.mark_ended()

    def _with_or_without_timeline(self, ask: Callable[[], T]) -> T:
        """Ask for a lease. If the server reports no timeline, ask again without it, and do so from then on."""
        try:
            return ask()
        except LedgerError as error:
            if not error.permanent or self._acquire == self._statements.acquire_by_clock or self._reports_timeline():
                raise
        _log.warning(
            "%s: the server does not report its timeline, so fences rest on its clock alone, and a promoted server "
            "whose clock is behind may repeat some; grant EXECUTE on pg_current_wal_lsn() and pg_walfile_name(pg_lsn)",
            self._subscriber_id,
        )
        self._acquire = self._statements.acquire_by_clock
        return ask()

    def _reports_timeline(self) -> bool:
        """Return whether the server reports its timeline; True also if the question fails for another reason."""
        try:
            self._run(self._statements.read_timeline, {})
        except LedgerError as error:
            return not error.permanent
        return True

    def _settle(self, statement: str, lease: Lease, **parameters: object) -> Any:
        with bounded(lease.lease_seconds * SILENT_PART):
            updated, row = self._run(statement, {**self._key(lease.message_id), "fence": lease.fence, **parameters})
        if not updated:
            raise lease.mark_lost()
        return row

    def _observe(self, microseconds: int, asked_at: float, seconds: float) -> None:
        step = self._clock.observe(microseconds / 1_000_000, sent=asked_at, received=elapsed(), hold_seconds=seconds)
        if step > 0:
            _log.warning(
                "%s: the database's clock went forward by %.0f s (or this machine was suspended): leases run out "
                "early; for %.1f s, none is taken over here that is not over by the clock before",
                self._subscriber_id,
                step,
                seconds,
            )
        elif step < 0:
            _log.warning(
                "%s: the database's clock was set back by %.0f s: messages of owners that died before it are free one "
                "more length of their lease after they were asked for",
                self._subscriber_id,
                -step,
            )

    def _shortened(self, message_id: str, fence: int, length: float, seconds_left: float) -> Acquisition:
        """Shorten another owner's lease that was given before the database's clock was set back."""
        _log.warning(
            "%s: the lease of %s would last %.0f s, and was asked for %.1f s: the database's clock was set back; it "
            "ends in %.1f s unless its owner renews it",
            self._subscriber_id,
            message_id,
            seconds_left,
            length,
            length,
        )
        self._run(self._statements.shorten, {**self._key(message_id), "fence": fence})
        return Acquisition(LeaseState.IN_FLIGHT, seconds_left=length)

    def _asking(self, message_id: str, lease_seconds: float, fingerprint: bytes | None) -> dict[str, Any]:
        asked = {"owner": owner(), "fingerprint": fingerprint, "lease_seconds": lease_seconds, "latest": None}
        return {**self._key(message_id), **asked}

    def _key(self, message_id: str) -> dict[str, Any]:
        return {"subscriber_id": self._subscriber_id, "message_id": message_id}

    def _run(self, statement: str, parameters: Mapping[str, Any]) -> tuple[int, Any]:
        """Run a statement in its own transaction; return how many rows it changed or found, and the first.

        It runs again if Postgres gave it up, and once more on another connection if the connection is gone, as happens
        to one that was in the pool for long. If the first run had committed by then, the second run of a renewal,
        completion or release changes nothing. The second run of an acquisition finds the message in flight until the
        lease has run out, because the client never received its fence.
        """

        def run(connection: Connection) -> tuple[int, Any]:
            require_server(connection)
            # On the connection: an engine's own level would override one set on the engine.
            connection.execution_options(isolation_level="AUTOCOMMIT")
            result = connection.exec_driver_sql(statement, dict(parameters))
            return result.rowcount, result.fetchone() if result.returns_rows else None

        def again(error: Exception, failures: int) -> bool:
            lost = isinstance(error, DBAPIError) and error.connection_invalidated
            return is_retryable(error) or (lost and failures == 1)

        with self._translated():
            work = partial(retry_on_new_connections, self._engine, run)
            return retry(work, again=again, backoff=STATEMENT_BACKOFF, runs=STATEMENT_RUNS)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as error:
            orig = error.orig if isinstance(error, DBAPIError) else None  # its text has no values, which are results
            if isinstance(error, DBAPIError) and (missing := missing_schema(error, self._table)):
                raise missing from orig
            permanent = not is_outage(error) and (sqlstate(error) or "").startswith(_PERMANENT)
            raise LedgerError(f"the ledger's database failed: {_text(error)}", permanent=permanent) from (orig or error)


def _record(row: Any) -> LeaseRecord:
    _, _, _, _, completed, seconds_left, _, result, fingerprint = row
    return LeaseRecord(
        completed=completed,
        seconds_left=seconds_left,
        result=None if result is None else bytes(result),
        fingerprint=None if fingerprint is None else bytes(fingerprint),
    )


def _text(error: SQLAlchemyError) -> str:
    """Return the error's own text, without the statement and its values."""
    text = " ".join(str(error.orig if isinstance(error, DBAPIError) else error).split())
    return f"{text}; {PREPARED_REMEDY}" if is_lost_prepared_statement(error) else text


_log = logging.getLogger("txbox.leases")

_PERMANENT = ("0A", "22", "23", "28", "3D", "3F", "42")
"""Classes of lasting errors: no such column, no permission, no such database. A full disk, a held lock and a server
that is no longer primary may pass."""
