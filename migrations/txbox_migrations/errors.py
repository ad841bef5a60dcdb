"""What the migrations raise."""

from txbox.errors import TxboxError


class MigrationError(TxboxError):
    """The tables cannot be moved to the version asked for; the message says why and what to do."""
