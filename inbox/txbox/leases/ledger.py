"""The port: a ledger of leases, in any store."""

from typing import Protocol

from txbox.errors import InvalidConfiguration
from txbox.leases.lease import LEASE_SECONDS, Acquisition, AttemptEnd, Lease


class Ledger(Protocol):
    """The leases of one subscriber's messages. Several threads may call every method at once.

    Each method is one atomic step of the store, visible to all once it has returned. Besides the errors below, each
    raises ``LedgerError`` if the store cannot be reached or refuses. ``renew``, ``complete`` and ``release`` also raise
    ``LeaseLost`` if another owner has taken over the lease.
    """

    @property
    def subscriber_id(self) -> str:
        """The consumer's name; each subscriber processes a message once."""

    def check(self) -> None:
        """Raise unless the store answers and has what it needs.

        Raises:
            SchemaMissing: the table in Postgres does not exist or is of an older version. A ledger in DynamoDB raises
                ``LedgerError`` instead.
        """

    def acquire(
        self, message_id: str, *, lease_seconds: float = LEASE_SECONDS, fingerprint: bytes | None = None
    ) -> Acquisition:
        """Ask for the lease of a message.

        Args:
            message_id: the message.
            lease_seconds: how long the lease lasts unless it is renewed.
            fingerprint: the SHA-256 of the payload, to refuse another payload under the same id; the first one given
                stays.

        Returns:
            ACQUIRED with the lease, COMPLETED with the stored result, or IN_FLIGHT. An expired lease is taken over.

        Raises:
            Mismatch: the id came with another payload before.
            InvalidMessageId: the id cannot be kept.
            InvalidConfiguration: ``lease_seconds`` is out of range.
        """

    def renew(self, lease: Lease, *, lease_seconds: float | None = None) -> None:
        """Extend a lease from now on, by its own length or by ``lease_seconds``."""

    def complete(self, lease: Lease, result: bytes | None = None) -> None:
        """Record, for good, that the work is done. A second call with the same lease changes nothing.

        Args:
            lease: the message's lease.
            result: what repeats of the message get.

        Raises:
            ResultNotStored: the result cannot be kept; the message is completed without it.
        """

    def release(self, lease: Lease, ended: AttemptEnd = AttemptEnd.FAILED, *, forget_attempts: bool = False) -> None:
        """Record that the attempt has ended without completing the message, which is free at once.

        Args:
            lease: the message's lease.
            ended: how the attempt ended.
            forget_attempts: count attempts from the first again, for a message that is parked; attempts that may have
                had their effect are not forgotten.
        """


def require_ledger(ledger: object, of: str) -> None:
    """Raise ``InvalidConfiguration`` unless ``ledger`` is one; ``of`` names the argument."""
    missing = [name for name in ("acquire", "renew", "complete", "release") if not hasattr(ledger, name)]
    if missing or isinstance(ledger, type):
        what = ledger.__name__ if isinstance(ledger, type) else f"an object of {type(ledger).__name__}"
        raise InvalidConfiguration(f'{of} must be a ledger, such as PostgresLedger("mailing", engine=…), not {what}')
