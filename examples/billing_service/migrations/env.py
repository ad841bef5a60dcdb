"""The environment of this service's alembic history."""

from alembic import context
from billing_service import settings
from billing_service.accounts import metadata
from sqlalchemy import create_engine

import txbox_migrations

engine = create_engine(settings.database_url())
with engine.connect() as connection:
    context.configure(
        connection=connection,
        target_metadata=metadata,
        include_object=txbox_migrations.include_object(),  # autogenerate leaves txbox's tables alone
    )
    with context.begin_transaction():
        context.run_migrations()
engine.dispose()
