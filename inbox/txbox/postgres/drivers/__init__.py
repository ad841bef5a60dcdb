"""Drivers and connections other than SQLAlchemy's over psycopg: what differs, so that no other code needs to know."""
