"""Our alembic history: one revision per step, run by ``upgrade_database``."""
