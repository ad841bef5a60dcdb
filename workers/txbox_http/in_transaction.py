"""In the transaction: the id, the effect and the response commit together, or none of them does.

::

    BEGIN ── record the id ─┬─ first: the handler's statements ── keep the response ── COMMIT ── send it
                            └─ duplicate: the response that was kept ── ROLLBACK ── send it again

If the process is killed before the commit, nothing remains, and a repeat runs. If it is killed after the commit, before
the response has reached the client, a repeat gets the kept response.
"""

import asyncio
import itertools
import json
import logging
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, cast

import anyio
from anyio.lowlevel import RunVar
from sqlalchemy import Connection, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker

from txbox.backoff import Backoff
from txbox.coroutines import AsyncInbox
from txbox.errors import InFlight, InvalidConfiguration, StatementLeftOpen, TransactionEnded
from txbox.inbox import Inbox
from txbox.postgres.driver_cursor import fetch_one
from txbox.postgres.drivers.asyncpg_connection import notice_pooler
from txbox.postgres.engines import note_server, require_server
from txbox.postgres.guards.commit_guard import (
    add_guard,
    begin_guarded,
    commit_guarded,
    pipelines,
    remove_guard,
)
from txbox.postgres.guards.connection_users import ConnectionUsers, abandon, watch
from txbox.postgres.guards.session_binds import bind_to_own, refuse_two_phases
from txbox.postgres.guards.transaction_guard import ends_transaction, is_ended, left_in_use, refuse_aborted
from txbox.postgres.server import SERVER
from txbox.postgres.sql_files import SqlFile
from txbox.postgres.sqlstates import INSUFFICIENT_PRIVILEGE, READ_ONLY, is_retryable, sqlstate
from txbox.postgres.transactions import commits_by_itself, missing_schema
from txbox_http.answer import Answer, headers_of, kept_headers
from txbox_http.problems import conflict, key_reused, parked, problem_of
from txbox_http.strength import MAX_RESPONSE_BYTES, Answered, KeyedRequest, Processed, processed_answer, until_done

RUNS = 6
"""How often to try to record an id that conflicts with other transactions, before that counts as an error."""

BACKOFF = Backoff(first_seconds=0.01, longest_seconds=0.5)
"""The delay between those tries."""

BEGIN_THREADS = 40
"""How many requests of a ``sessionmaker`` may wait for a connection or for another request at once, per event loop."""

Sessions = async_sessionmaker[Any] | sessionmaker[Any]


class ResponseStatements(SqlFile, file="responses.sql"):
    keep: str
    find: str


class InTransaction:
    """Does a request once, together with its response, in one transaction of Postgres. Implements ``Strength``.

    Its handler is given a new session whose transaction records the request. The handler must not end that transaction.
    """

    def __init__(
        self,
        sessions: Sessions,
        inbox: Inbox | AsyncInbox,
        *,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
        processed: Processed | None = None,
    ) -> None:
        """Set where the transactions run; do not connect yet.

        Args:
            sessions: an ``async_sessionmaker``, for coroutine handlers, or a ``sessionmaker``, for functions. It must
                have one engine, even with ``binds`` or ``get_bind``: a session that asks for another engine, with a key
                or without, gets ``InvalidConfiguration``, and nothing is committed.
            inbox: the subscriber's inbox; a worker with the same inbox treats a message of the same id as the same.
            max_response_bytes: the largest body of a response. A larger one fails, and nothing is committed.
            processed: given the request and the session, makes the response if the effect is there but no response is
                kept. None means status 204.

        Raises:
            InvalidConfiguration: an argument cannot work.
        """
        if not isinstance(sessions, async_sessionmaker | sessionmaker):
            raise InvalidConfiguration(
                f"InTransaction.sessions must be an async_sessionmaker or a sessionmaker, not {sessions!r}"
            )
        refuse_two_phases(sessions, "InTransaction.sessions")
        self._sessions = sessions
        self._inbox = inbox.sync_inbox if isinstance(inbox, AsyncInbox) else inbox
        self._max_response_bytes = max_response_bytes
        self._processed = processed
        self._begin_threads: RunVar[anyio.CapacityLimiter] = RunVar("txbox_http_begin_threads")
        self._statements = ResponseStatements.load(self._inbox.schema, self._inbox.prefix)

    async def begin(self, keyed: KeyedRequest) -> "SessionWork":
        """Record a request; raises like ``Strength.begin``."""
        for run in itertools.count(1):
            work = SessionWork(self._session(), self._max_response_bytes)
            try:
                found = await work.call(self._record, keyed, threads=self._threads())
                if found is None:
                    work.keep_with(self, keyed)
                    return work
                raise Answered(await self._repeat(keyed, work, *found))
            except Exception as error:
                await work.close()
                if (answer := problem_of(error, keyed.documentation)) is not None:
                    raise Answered(answer) from error
                if not is_retryable(error):
                    raise
                if run == RUNS:
                    raise Answered(conflict(keyed.documentation)) from error
            except BaseException:
                await work.close()
                raise
            await anyio.sleep(BACKOFF.seconds(run))
        raise AssertionError("unreachable")

    async def begin_without_key(self) -> "SessionWork":
        """Begin a transaction in which nothing is recorded."""
        work = SessionWork(self._session(), None)
        if not isinstance(work.subject, AsyncSession):
            try:  # otherwise handlers would wait for connections, in threads that those with connections need
                await work.call(Session.connection, threads=self._threads())
            except BaseException:
                await work.close()
                raise
        return work

    def _session(self) -> AsyncSession | Session:
        """Return a new session of one engine. It refuses statements after the response: nothing would commit them."""
        session: AsyncSession | Session = self._sessions(close_resets_only=False)
        own = session.sync_session if isinstance(session, AsyncSession) else session
        bind = bind_to_own(own, "InTransaction.sessions")
        if bind.dialect.driver == "asyncpg":
            notice_pooler(bind.engine)
        return session

    def _threads(self) -> anyio.CapacityLimiter:
        """Return the limiter of the threads that begin requests.

        They wait for connections, and requests with a connection need threads for their handlers and for their end. So
        a thread that begins a request is neither one of anyio's default threads, which handlers use, nor one that ends
        a transaction.
        """
        try:
            return self._begin_threads.get()
        except LookupError:
            self._begin_threads.set(anyio.CapacityLimiter(BEGIN_THREADS))
            return self._begin_threads.get()

    def _record(self, session: Session, keyed: KeyedRequest) -> tuple[Any, ...] | None:
        """Record a request; return what is known of it if it is a duplicate."""
        require_server(session.connection())
        for _ in range(RUNS):
            with _recording(self._statements.name_of("processed_message")):
                if self._inbox.record(session, keyed.message_id, keyed.body, sent_at=keyed.sent_at):
                    return None
            if (row := self._fetch(session, self._statements.find, keyed)) is not None:
                return tuple(row)
            # A redrive or a maintainer has deleted the row since: the request can be recorded now.
        raise InFlight(self._inbox.subscriber_id, (keyed.message_id,))

    async def _repeat(
        self, keyed: KeyedRequest, work: "SessionWork", is_parked: bool, fingerprint: Any, *response: Any
    ) -> Answer:
        if is_parked:
            return parked(keyed.documentation)
        if fingerprint is None:
            return await processed_answer(self._processed, keyed.request, work.subject)
        if bytes(fingerprint) != keyed.fingerprint:
            return key_reused(keyed.documentation)
        status, headers, body = response
        return Answer(status, headers_of(json.loads(headers)), bytes(body)).replayed()

    def keep(self, session: Session, keyed: KeyedRequest, answer: Answer) -> None:
        """Keep a response in the transaction that recorded its request; raise ``TransactionEnded`` if it has ended."""
        kept = {"status": answer.status, "headers": json.dumps(kept_headers(answer.headers)), "body": answer.body}
        if self._fetch(session, self._statements.keep, keyed, fingerprint=keyed.fingerprint, **kept) is None:
            raise TransactionEnded

    def _fetch(self, session: Session, statement: str, keyed: KeyedRequest, **values: Any) -> Any:
        ids = {"subscriber_id": self._inbox.subscriber_id, "message_id": keyed.message_id}
        try:
            return fetch_one(session.connection(), statement, ids | values)
        except Exception as error:
            missing = missing_schema(cast(Any, error), self._statements.name_of("kept_response"))
            if missing is not None:
                raise missing from error
            raise


@contextmanager
def _recording(table: str) -> Iterator[None]:
    """Raise ``InvalidConfiguration``, in one line, if this user or this server cannot record a request."""
    try:
        yield
    except DBAPIError as error:
        if sqlstate(error) not in (INSUFFICIENT_PRIVILEGE, READ_ONLY):
            raise
        said = str(error.orig).partition("\n")[0]
        raise InvalidConfiguration(f"requests cannot be recorded in {table}: {said}") from error


class SessionWork:
    """A session whose transaction belongs to one request. Implements ``Work``."""

    may_run_again = True

    def __init__(self, session: AsyncSession | Session, max_response_bytes: int | None) -> None:
        self.subject = session
        self.max_response_bytes = max_response_bytes
        self._session: Session = session.sync_session if isinstance(session, AsyncSession) else session
        self._keep: tuple[InTransaction, KeyedRequest] | None = None
        self._is_ours = False
        self._is_closed = False
        self._users = ConnectionUsers()
        self._connections: list[Connection] = []
        self._guarded: list[Connection] = []
        event.listen(self._session, "before_commit", self._refuse_commit)
        event.listen(self._session, "after_begin", self._guard)

    async def call(self, function: Any, *arguments: Any, threads: anyio.CapacityLimiter | None = None) -> Any:
        """Call a function with the session, in a greenlet or a thread. A cancellation waits until the thread ends.

        ``threads`` limits how many threads there are; None means not to wait for one.
        """
        if isinstance(self.subject, AsyncSession):
            return await self.subject.run_sync(function, *arguments)
        return await self._to_its_end(
            anyio.to_thread.run_sync(function, self._session, *arguments, limiter=threads or anyio.CapacityLimiter(1))
        )

    @staticmethod
    async def _to_its_end(coroutine: Coroutine[Any, Any, Any]) -> Any:
        call = asyncio.ensure_future(coroutine)
        if (cancelled := await until_done(call)) is not None:
            raise cancelled from (None if call.cancelled() else call.exception())
        return call.result()

    def keep_with(self, strength: InTransaction, keyed: KeyedRequest) -> None:
        """Set that the request is recorded and its answer must be kept."""
        self._keep = (strength, keyed)

    async def finish(self, answer: Answer, *, done: bool) -> None:
        """Commit with the answer, or roll back. Raises what the commit raises, such as the loss of its answer."""
        if done:
            await self.call(self._commit, answer)
        await self.close()

    async def abandon(self, error: BaseException) -> None:  # noqa: ARG002 - the port has it
        await self.close()

    async def close(self) -> None:
        """Give the connection back, even when the request is cancelled; what was not committed is rolled back.

        A handler's thread, or a task that it has shielded, may still be working then: its connection is abandoned.
        """
        if self._is_closed:
            return
        self._is_closed = True
        await self._to_its_end(self.call(self._close))

    def _close(self, session: Session) -> None:
        # A ROLLBACK would wait for a stream that the handler has left open.
        if self._users.end() or self._users.have_streams() or any(map(left_in_use, self._connections)):
            self._abandon_all()
            return
        try:
            session.close()
        except Exception:  # noqa: BLE001 - a thread may be using the session itself; nothing is left to undo
            _log.warning("a request's session could not be closed: its connection is given up", exc_info=True)
            self._abandon_all()
            return
        for connection in self._connections:
            if not (connection.closed or connection.invalidated):  # the host's connection, which it continues to use
                self._release(connection)

    def _release(self, connection: Connection) -> None:
        """Restore a connection that the host has bound the session to."""
        self._users.detach(connection)
        for name, listener in (
            ("commit", self._commit_below),
            ("before_cursor_execute", self._refuse_commit_as_sql),
            ("before_cursor_execute", self._refuse_after_end),
        ):
            if event.contains(connection, name, listener):
                event.remove(connection, name, listener)

    def _abandon_all(self) -> None:
        for connection in self._connections:
            abandon(connection)

    def _commit(self, session: Session, answer: Answer) -> None:
        if self._users.end():
            raise StatementLeftOpen
        if self._keep is not None:
            refuse_aborted(session.connection())
            session.flush()
            strength, keyed = self._keep
            strength.keep(session, keyed, answer)
        elif session.in_transaction():
            if left_in_use(session.connection()):
                raise StatementLeftOpen
            session.flush()
        self._is_ours = True
        session.commit()
        for connection in self._guarded:
            if connection.in_transaction():  # the host has bound the session to it and commits it
                remove_guard(connection)
        self._guarded.clear()

    def _refuse_commit(self, session: Session) -> None:
        """Stop a handler that commits: its response would not be kept, and a repeat could not have it."""
        if not self._is_ours and not session.in_nested_transaction():
            raise TransactionEnded

    def _guard(self, _session: Session, _transaction: object, connection: Connection) -> None:
        """Guard a connection of the session, because handlers can reach it. Listening again changes nothing."""
        if connection in self._connections:  # a savepoint has begun
            return
        self._connections.append(connection)
        self._users.attach(connection)
        watch(connection)
        if connection.dialect.name == "postgresql" and not commits_by_itself(connection):
            if pipelines(connection):
                with self._users.using(connection):
                    note_server(connection, begin_guarded(connection))
            else:
                if _NOTED not in connection.info:
                    note_server(connection, connection.exec_driver_sql(SERVER.backend_pid).scalar_one())
                    connection.info[_NOTED] = True
                add_guard(connection)
            self._guarded.append(connection)
            event.listen(connection, "before_cursor_execute", self._refuse_after_end)
        event.listen(connection, "commit", self._commit_below)
        event.listen(connection, "before_cursor_execute", self._refuse_commit_as_sql)

    def _commit_below(self, connection: Connection) -> None:
        """Refuse a commit that is not ours. Remove the guard before one that is, in the same round trip where possible.

        In an aborted transaction the guard stays: COMMIT would roll that back, and drivers do not report it.
        """
        # For SQLAlchemy, a transaction whose commit has failed is over: it would return to the pool still open.
        if not self._is_ours:
            abandon(connection)
            raise TransactionEnded
        if connection not in self._guarded:
            return
        self._guarded.remove(connection)
        try:
            if pipelines(connection) and len(connection.dispatch.commit) == 1:
                commit_guarded(connection)
            else:  # the host's listeners may add something before the commit
                remove_guard(connection)
        except BaseException:
            if not (connection.closed or connection.invalidated or is_ended(connection)):
                abandon(connection)
            raise

    def _refuse_commit_as_sql(self, _connection: Connection, _cursor: object, statement: str, *_: object) -> None:
        if not self._is_ours and ends_transaction(statement):
            raise TransactionEnded

    def _refuse_after_end(self, connection: Connection, *_: object) -> None:
        """Stop a statement after the end of the transaction, which asyncpg would let commit by itself."""
        if is_ended(connection):
            raise TransactionEnded


_NOTED = "txbox_http_server_noted"
_log = logging.getLogger("txbox.http")
