"""Under a lease: for effects that no transaction covers, such as charging a card.

::

    acquire the lease ─┬─ acquired: the handler, while the lease is renewed ── complete, with the response ── send it
                       ├─ completed: the response that was kept
                       └─ in flight: 409

The lease runner does all of that. Here it runs as a task whose work is to wait for the handler's response.
"""

import asyncio
import logging
from typing import Any

from txbox.errors import EffectUnknown, ResultNotStored
from txbox.leases.lease import LEASE_SECONDS, Lease
from txbox.leases.ledger import Ledger, require_ledger
from txbox.leases.runner import LeaseRunner, WorkResult, refuse_expired
from txbox.outcome import Outcome
from txbox_http.answer import Answer, decoded, encoded
from txbox_http.problems import problem_of
from txbox_http.strength import MAX_RESPONSE_BYTES, Answered, KeyedRequest, Processed, processed_answer, until_done


class UnderLease:
    """Does a request under a lease and keeps its response in the ledger. Implements ``Strength``.

    Its handler is given the lease: ``Lease.unknown_attempts`` says whether an earlier attempt may have had its effect.
    An answer of 4xx says that nothing has happened. An error, or an answer of 5xx, releases the lease as a worker's
    would: see ``EffectUnknown``.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        lease_seconds: float = LEASE_SECONDS,
        wait_seconds: float = 0.0,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
        processed: Processed | None = None,
    ) -> None:
        """Name the ledger; do not connect yet.

        Args:
            ledger: ``PostgresLedger`` or ``DynamoDBLedger``; it is called in threads.
            lease_seconds: how long a request stays with a process that has died.
            wait_seconds: how long to wait for another request with the key before answering 409.
            max_response_bytes: the largest body of a response that is kept. A larger one is sent as it comes and not
                kept; nor is one that the ledger refuses.
            processed: given the request and None, makes the response if the effect is there but no response is kept.
                None means status 204.

        Raises:
            InvalidConfiguration: an argument cannot work.
        """
        require_ledger(ledger, "UnderLease.ledger")
        self._ledger = ledger
        self._processed = processed
        self._max_response_bytes = max_response_bytes

        def encode(answer: Answer) -> bytes:
            if not answer.is_whole or len(answer.body) > max_response_bytes:
                raise ValueError(f"the response has more than {max_response_bytes:,} bytes")
            return encoded(answer)

        self._runner = LeaseRunner(
            ledger,
            lease_seconds=lease_seconds,
            wait_seconds=wait_seconds,
            keep_result=True,
            encode=encode,
            decode=decoded,
        )

    async def begin(self, keyed: KeyedRequest) -> "LeaseWork":
        """Acquire the lease of a request; raises like ``Strength.begin``."""
        acquired: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        ended: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

        async def work(lease: Lease) -> Answer:
            await asyncio.to_thread(refuse_expired, self._ledger, lease, keyed.sent_at)
            lease.begin_work()
            acquired.set_result(lease)
            return await ended

        task = asyncio.create_task(self._runner.run_async(keyed.message_id, work, fingerprint=keyed.fingerprint))
        try:
            waited: list[asyncio.Future[Any]] = [task, acquired]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            await until_done(task)
            raise
        if acquired.done():
            return LeaseWork(acquired.result(), task, ended, self._max_response_bytes)
        try:
            done = task.result()
        except Exception as error:
            if (answer := problem_of(error, keyed.documentation)) is not None:
                raise Answered(answer) from error
            raise
        assert done.outcome is Outcome.DUPLICATE  # noqa: S101 - for the reader: it was not acquired
        if done.result is None:
            raise Answered(await processed_answer(self._processed, keyed.request, None))
        raise Answered(done.result.replayed())

    async def begin_without_key(self) -> None:
        """Do nothing: without a key there is no lease."""
        return


class LeaseWork:
    """A request under its lease. Implements ``Work``."""

    may_run_again = False

    def __init__(
        self,
        lease: Lease,
        task: "asyncio.Task[WorkResult]",
        ended: "asyncio.Future[Answer]",
        max_response_bytes: int | None,
    ) -> None:
        self.subject = lease
        self.max_response_bytes = max_response_bytes
        self._task = task
        self._ended = ended

    async def finish(self, answer: Answer, *, done: bool) -> None:
        """Complete the message with the answer, or release it.

        Raises:
            LeaseLost, LedgerError: the effect is there but the ledger does not know: a repeat may run again.
        """
        if not done:
            await self.abandon(_Unknown(answer) if answer.status >= 500 else _Refused(answer))
            return
        self._ended.set_result(answer)
        try:
            await asyncio.shield(self._task)
        except ResultNotStored as error:
            _log.warning("%s", error)

    async def abandon(self, error: BaseException) -> None:
        """Release the message, as after an error in a worker's handler."""
        if not self._ended.done():
            self._ended.set_exception(error)
        cancelled = await until_done(self._task)
        if not self._task.cancelled():
            self._task.exception()  # the given error; otherwise asyncio would warn that it was never retrieved
        if cancelled is not None:
            raise cancelled


class _Refused(Exception):
    """The handler has answered that nothing was done."""


class _Unknown(EffectUnknown):
    """The handler has answered that something went wrong."""


_log = logging.getLogger("txbox.http")
