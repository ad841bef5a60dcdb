"""Our tables, in a place where they are not yet."""

from functools import cache

from sqlalchemy import Engine, create_mock_engine
from sqlalchemy.schema import CreateSchema

from txbox.schema import tables


@cache
def table_statements(schema: str | None = None, prefix: str = "") -> str:
    """Return everything that makes the tables, for one round trip."""
    statements: list[str] = []
    engine = create_mock_engine(
        "postgresql+psycopg://", lambda sql, *_, **__: statements.append(str(sql.compile(dialect=engine.dialect)))
    )
    tables(schema, prefix).metadata.create_all(engine, checkfirst=False)
    return ";".join(statements)


def make_tables(engine: Engine, schema: str | None = None, prefix: str = "") -> None:
    """Make a schema, if one is named, and all tables in it."""
    with engine.begin() as connection:
        if schema is not None:
            connection.execute(CreateSchema(schema))
        connection.exec_driver_sql(table_statements(schema, prefix))
