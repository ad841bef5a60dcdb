"""Django's tests that commit: empty txbox's tables between them, as Django empties those of the models.

``TestCase`` rolls back and needs none of this. ``TransactionTestCase`` empties the tables of models but does not know
ours: what one test has recorded would be a duplicate in the next.
"""

from typing import Any

from django.conf import settings
from django.db import connections, router

from txbox.extras import needs
from txbox.schema import TABLE_NAMES

with needs("django"):
    from django.test import TransactionTestCase

__all__ = ["EmptiesTxbox", "empty_txbox"]

KEPT = "inbox_generation"
"""The table that lists the parts of a rotating inbox: the parts are emptied, and stay."""


class EmptiesTxbox(TransactionTestCase):
    """Empties txbox's tables after each test; a base for your test cases in place of ``TransactionTestCase``.

    It does so in each database of ``databases`` that has them. Stop workers and relays before a test ends.
    """

    def run(self, result: Any = None) -> Any:
        """Run the test, then empty the tables."""
        try:
            return super().run(result)
        finally:
            for alias in self._databases_names(include_mirrors=False):
                empty_txbox(alias)


def empty_txbox(using: str = "default") -> None:
    """Empty the tables that ``migrate`` created for txbox, in a transaction; skip those that do not exist.

    For fixtures of pytest-django, after a test with ``transactional_db``. Fences and letter numbers keep rising.

    Args:
        using: the alias of the database.

    Raises:
        django.db.utils.OperationalError: a table is locked, for example by a worker that is still running, and
            ``lock_timeout`` is set; or the database does not answer.
    """
    connection = connections[using]
    if connection.vendor != "postgresql" or not router.allow_migrate(using, "txbox_django"):
        return
    quote = connection.ops.quote_name
    schema, prefix = getattr(settings, "TXBOX_SCHEMA", None), getattr(settings, "TXBOX_PREFIX", "")
    names = [
        (f"{quote(schema)}." if schema is not None else "") + quote(f"{prefix}{name}")
        for name in TABLE_NAMES
        if name != KEPT
    ]
    with connection.cursor() as cursor:
        cursor.execute("SELECT name FROM unnest(%s::text[]) AS name WHERE to_regclass(name) IS NOT NULL", [names])
        if found := ", ".join(name for (name,) in cursor.fetchall()):
            cursor.execute(f"TRUNCATE {found}")
