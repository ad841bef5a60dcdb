"""Dead letters in threads: those of an engine for functions, beside a ledger alone."""

from sqlalchemy import Engine

from txbox import DeadLetter, DeadLetters
from txbox_workers.coroutines.thread_calls import ThreadCalls


class ThreadedLetters(DeadLetters):
    """Dead letters whose transactions under a lease, begun in a greenlet, run in another thread."""

    def __init__(self, letters: DeadLetters, calls: ThreadCalls) -> None:
        """Take the dead letters, and what calls in threads."""
        super().__init__(letters.engine, schema=letters.schema, prefix=letters.prefix)
        self._letters = letters
        self._calls = calls

    def on(self, engine: Engine) -> DeadLetters:
        """Return the same over another engine of the same database."""
        return ThreadedLetters(self._letters.on(engine), self._calls)

    def park_leased(self, letter: DeadLetter, lease_attempts: int) -> int:
        """Park a message, also if cancelled meanwhile: what is parked is acked."""
        return self._calls.call_through(self._letters.park_leased, letter, lease_attempts)

    def waits(self, subscriber_id: str, message_id: str, body: bytes, lease_attempts: int) -> bool:
        """Whether a message was parked and not redriven."""
        return self._calls.call(self._letters.waits, subscriber_id, message_id, body, lease_attempts)

    def lease_attempts(self, subscriber_id: str, message_id: str) -> int:
        """How many attempts under leases a message had when it was parked last."""
        return self._calls.call(self._letters.lease_attempts, subscriber_id, message_id)
