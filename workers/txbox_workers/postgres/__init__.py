"""Postgres itself as the road: workers that take a subscriber's messages from the outbox of their own database."""

from txbox_workers.postgres.source import PostgresSource
from txbox_workers.postgres.worker import AsyncPostgresWorker, PostgresWorker

__all__ = ["AsyncPostgresWorker", "PostgresSource", "PostgresWorker"]
