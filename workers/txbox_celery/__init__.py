"""Celery: a task whose body runs in the transaction that records it, so that it is applied once."""

from txbox.extras import needs

with needs("celery"):
    from txbox_celery.inbox_task import MessageParked, inbox_task

__all__ = ["MessageParked", "inbox_task"]
