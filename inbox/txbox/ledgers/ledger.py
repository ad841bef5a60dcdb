"""What a ledger is, wherever it keeps its leases."""

from typing import Protocol

from txbox.ledgers.lease import LEASE_SECONDS, Acquisition, Lease

__all__ = ["Ledger"]


class Ledger(Protocol):
    """Where the leases of one subscriber's messages live. Every method may be called by several threads at once.

    Each method is one atomic step of the store, seen by everybody once it has returned. Besides the errors below, each
    raises ``LedgerError`` if the store cannot be reached or refuses.
    """

    @property
    def subscriber_id(self) -> str:
        """The consumer's name; each subscriber processes a message once."""

    def check(self) -> None:
        """See that the store answers, and has what it needs.

        Raises:
            SchemaMissing: its table in Postgres does not exist. In DynamoDB, that is a ``LedgerError``.
        """

    def acquire(
        self, message_id: str, *, seconds: float = LEASE_SECONDS, fingerprint: bytes | None = None
    ) -> Acquisition:
        """Ask for the lease of a message.

        Args:
            message_id: the message.
            seconds: how long the lease lasts, unless it is renewed.
            fingerprint: the SHA-256 of its payload, to have another payload under the same id refused; the first one
                that is given stays.

        Returns:
            ACQUIRED with the lease, COMPLETED with the stored result, or IN_FLIGHT. An expired lease is taken over.

        Raises:
            Mismatch: the id came with another payload before.
            InvalidMessageId: the id cannot be kept.
            InvalidConfiguration: a lease cannot be that long.
        """

    def renew(self, lease: Lease, *, seconds: float | None = None) -> None:
        """Have a lease last as long as it did at first, or so many seconds, from now on.

        Raises:
            LeaseLost: somebody else has taken it over.
        """

    def complete(self, lease: Lease, result: bytes | None = None) -> None:
        """Say that the work is done, for good. The same lease may say so again, with nothing changed.

        Args:
            lease: of what.
            result: what repeats of the message get.

        Raises:
            LeaseLost: somebody else has taken it over.
            ResultNotStored: the result cannot be kept; the message is completed without it.
        """

    def release(self, lease: Lease, *, forget_attempts: bool = False, unknown: bool = False) -> None:
        """Say that the attempt has failed: the message is free at once.

        Args:
            lease: of what.
            unknown: it may have had its effect all the same; the next one is to be told.
            forget_attempts: have the next attempt be the first again; for a message that is parked.

        Raises:
            LeaseLost: somebody else has taken it over.
        """
