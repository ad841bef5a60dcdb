"""What the migrations raise."""

from alembic.util import CommandError

from txbox.errors import TxboxError


class MigrationError(TxboxError, CommandError):
    """The tables cannot be moved to the version asked for; the message says why and what to do.

    It is an error of alembic's commands, too: so they end with the message, and without a traceback.
    """
