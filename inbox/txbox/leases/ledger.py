"""The port: a ledger of leases, in any store."""

from typing import Protocol

from txbox.errors import InvalidConfiguration
from txbox.leases.lease import LEASE_SECONDS, Acquisition, AttemptEnd, Lease


class Ledger(Protocol):
    """The leases of one subscriber's messages. Every method may be called by several threads at once.

    Each method is one atomic step of the store, visible to all once it has returned. Besides the errors below, each
    raises ``LedgerError`` if the store cannot be reached or refuses; and ``renew``, ``complete`` and ``release`` raise
    ``LeaseLost`` if another owner has taken the lease over.
    """

    @property
    def subscriber_id(self) -> str:
        """The consumer's name; each subscriber processes a message once."""

    def check(self) -> None:
        """Check that the store answers, and has what it needs.

        Raises:
            SchemaMissing: its table in Postgres does not exist, or is of an older version. In DynamoDB, that is a
                ``LedgerError``.
        """

    def acquire(
        self, message_id: str, *, lease_seconds: float = LEASE_SECONDS, fingerprint: bytes | None = None
    ) -> Acquisition:
        """Ask for the lease of a message.

        Args:
            message_id: the message.
            lease_seconds: how long the lease lasts, unless it is renewed.
            fingerprint: the SHA-256 of its payload, to have another payload under the same id refused; the first one
                that is given stays.

        Returns:
            ACQUIRED with the lease, COMPLETED with the stored result, or IN_FLIGHT. An expired lease is taken over.

        Raises:
            Mismatch: the id came with another payload before.
            InvalidMessageId: the id cannot be kept.
            InvalidConfiguration: a lease cannot be that long.
        """

    def renew(self, lease: Lease, *, lease_seconds: float | None = None) -> None:
        """Extend a lease from now on, by its own length or by so many seconds."""

    def complete(self, lease: Lease, result: bytes | None = None) -> None:
        """Record that the work is done, for good. A second call with the same lease changes nothing.

        Args:
            lease: of what.
            result: what repeats of the message get.

        Raises:
            ResultNotStored: the result cannot be kept; the message is completed without it.
        """

    def release(self, lease: Lease, ended: AttemptEnd = AttemptEnd.FAILED, *, forget_attempts: bool = False) -> None:
        """Record that the attempt has ended and completed nothing: the message is free at once.

        Args:
            lease: of what.
            ended: how.
            forget_attempts: make the next attempt the first again, for a message that is parked; attempts that may have
                had their effect are not forgotten.
        """


def require_ledger(ledger: object, of: str) -> None:
    """Raise ``InvalidConfiguration`` if something is not a ledger; ``of`` names the argument."""
    missing = [name for name in ("acquire", "renew", "complete", "release") if not hasattr(ledger, name)]
    if missing or isinstance(ledger, type):
        what = ledger.__name__ if isinstance(ledger, type) else f"an object of {type(ledger).__name__}"
        raise InvalidConfiguration(f'{of} must be a ledger, such as PostgresLedger("mailing", engine=…), not {what}')
