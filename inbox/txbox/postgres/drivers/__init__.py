"""Other drivers and connections than SQLAlchemy's over psycopg: what differs, so that nothing else has to know."""
