"""Django: messages in the transaction of its ORM, our tables among its migrations, and the worker as its command.

``inbox.record(django.db.connection, …)`` and ``outbox.publish(django.db.connection, …)`` need nothing from this
package: Django's connection is accepted wherever psycopg's is. With it, and ``INSTALLED_APPS = ["txbox_django", …]``:

- ``manage.py migrate`` creates our tables;
- ``orm_worker`` makes a worker whose handlers use the ORM, in the transaction that records the message;
- ``manage.py txbox_worker MODULE:NAME`` runs it.
"""

from txbox.extras import needs

with needs("django"):
    from txbox_django.engine import database_engine
    from txbox_django.worker import orm_worker

__all__ = ["database_engine", "orm_worker"]
