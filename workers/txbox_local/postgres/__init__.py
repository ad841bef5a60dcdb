"""A PostgreSQL server of our own."""
