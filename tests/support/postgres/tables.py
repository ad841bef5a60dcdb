"""Our tables, in a place where they are not yet."""

from sqlalchemy import Engine
from sqlalchemy.schema import CreateSchema

from txbox.schema import tables


def make_tables(engine: Engine, schema: str | None = None, prefix: str = "") -> None:
    """Make a schema, if one is named, and all tables in it."""
    with engine.begin() as connection:
        if schema is not None:
            connection.execute(CreateSchema(schema))
        tables(schema, prefix).metadata.create_all(connection)
