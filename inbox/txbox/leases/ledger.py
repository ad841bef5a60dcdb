"""What a ledger is, wherever it keeps its leases."""

from typing import Protocol

from txbox.errors import InvalidConfiguration
from txbox.leases.lease import LEASE_SECONDS, Acquisition, Ended, Lease

__all__ = ["Ledger", "require_ledger"]


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
            SchemaMissing: its table in Postgres does not exist, or is of an older version. In DynamoDB, that is a
                ``LedgerError``.
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

    def release(self, lease: Lease, ended: Ended = Ended.FAILED, *, forget_attempts: bool = False) -> None:
        """Say that the attempt has ended and completed nothing: the message is free at once.

        Args:
            lease: of what.
            ended: how: it has failed, it may have had its effect all the same (counted or not), or it was not made at
                all.
            forget_attempts: have the next attempt be the first again, for a message that is parked; those whose end
                nobody knows are not forgotten.

        Raises:
            LeaseLost: somebody else has taken it over.
        """


def require_ledger(ledger: object, of: str) -> None:
    """See that something is a ledger.

    Args:
        ledger: what was given.
        of: as which argument, for the error.

    Raises:
        InvalidConfiguration: it is not.
    """
    missing = [name for name in ("acquire", "renew", "complete", "release") if not hasattr(ledger, name)]
    if missing or isinstance(ledger, type):
        what = ledger.__name__ if isinstance(ledger, type) else f"an object of {type(ledger).__name__}"
        raise InvalidConfiguration(f'{of} must be a ledger, such as PostgresLedger(engine, "mailing"), not {what}')
