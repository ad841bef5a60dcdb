"""Alembic's entry point for ``upgrade_database``: reads its arguments from the configuration's attributes."""

from alembic import context

from txbox_migrations.environment import run_offline, run_online

attributes = context.config.attributes
if context.is_offline_mode():
    run_offline(schema=attributes["schema"], prefix=attributes["prefix"])
else:
    attributes["change"] = run_online(
        attributes["connection"], schema=attributes["schema"], prefix=attributes["prefix"]
    )
