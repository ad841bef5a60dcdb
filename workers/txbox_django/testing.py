"""Django's tests that commit: between them, txbox's tables are emptied as those of the models are.

``TestCase`` rolls back, and needs nothing of this. ``TransactionTestCase`` empties the tables of models, and knows
none of ours: what one test has recorded would be a duplicate in the next one.
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
"""Says which parts a rotating inbox has: they are emptied, and stay."""


class EmptiesTxbox(TransactionTestCase):
    """Empties txbox's tables after each test: a base for your test cases, in place of ``TransactionTestCase``.

    It does so in each database of ``databases`` that has them. Stop workers and relays before a test ends.
    """

    def run(self, result: Any = None) -> Any:
        """Run the test, and empty the tables then."""
        try:
            return super().run(result)
        finally:
            for alias in self._databases_names(include_mirrors=False):
                empty_txbox(alias)


def empty_txbox(using: str = "default") -> None:
    """Empty the tables that ``migrate`` has made for txbox, in a transaction; those that are not there are left out.

    For fixtures of pytest-django, after a test with ``transactional_db``. Fences and the numbers of letters go on
    rising.

    Args:
        using: the alias of the database.

    Raises:
        django.db.utils.OperationalError: a table is locked, such as by a worker that is still at work, and
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
