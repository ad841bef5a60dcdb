"""What the migrations raise."""

from alembic.util import CommandError

from txbox.errors import TxboxError


class MigrationError(TxboxError, CommandError):
    """The tables cannot be moved to the requested version; the message says why and what to do.

    It is also an error of alembic's commands, so they end with the message and without a traceback.
    """
