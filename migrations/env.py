"""Alembic's entry point for work in this repository: reads the database's URL, then calls the package."""

import logging
import os

from alembic import context
from alembic.util import CommandError

from txbox.errors import TxboxError
from txbox_migrations.database import connected
from txbox_migrations.environment import run_offline, run_online
from txbox_migrations.version_mark import require_prefix

logging.basicConfig(format="%(message)s")
logging.getLogger("alembic").setLevel(logging.INFO)

settings = context.get_x_argument(as_dictionary=True)
schema = settings.get("schema")
prefix = settings.get("prefix", "")

try:
    require_prefix(prefix)
    if context.is_offline_mode():
        run_offline(schema=schema, prefix=prefix)
    else:
        url = settings.get("url") or os.environ.get("TXBOX_DATABASE_URL")
        if not url:
            raise CommandError("which database? Set TXBOX_DATABASE_URL, or pass -x url=postgresql://…")
        with connected(url) as connection:
            run_online(connection, schema=schema, prefix=prefix)
except TxboxError as error:
    raise CommandError(str(error)) from error
