"""What became of one delivery."""

from enum import StrEnum


class Outcome(StrEnum):
    """What became of one delivery of a message.

    A delivery is acked after PROCESSED, DUPLICATE, DEAD, MISMATCH and EXPIRED, and handed back to the broker after
    IN_FLIGHT and FAILED.
    """

    PROCESSED = "processed"
    """The handler's effects have committed, for the first and only time."""
    DUPLICATE = "duplicate"
    """They had committed before; the handler did not run."""
    IN_FLIGHT = "in_flight"
    """Undecided: another transaction works on it, or the answer to our own commit was lost."""
    FAILED = "failed"
    """The handler raised; everything was rolled back, and the message will be tried again."""
    DEAD = "dead"
    """It failed for the last time, and is parked as a dead letter."""
    MISMATCH = "mismatch"
    """Its id had come with another body; the handler did not run, and the message is parked."""
    EXPIRED = "expired"
    """It is too old to tell whether it was processed; the handler did not run, and the message is parked."""

    def __init__(self, value: str) -> None:
        self.acked = value not in ("in_flight", "failed")
        """Whether the broker may forget the delivery."""
