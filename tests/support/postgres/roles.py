"""Roles that lack rights."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Engine, create_engine

from support.postgres.statements import run


@contextmanager
def restricted(engine: Engine, *revoked: str) -> Iterator[Engine]:
    """An engine of a role that may do everything with the tables but what is revoked: ``DELETE ON dead_letter``."""
    with engine.connect() as connection:
        schema = connection.exec_driver_sql("SELECT current_schema()").scalar_one()
    role = f"restricted_{uuid.uuid4().hex[:8]}"
    run(engine, f"CREATE ROLE {role}")
    run(engine, f"GRANT USAGE ON SCHEMA {schema} TO {role}")
    run(engine, f"GRANT ALL ON ALL TABLES IN SCHEMA {schema} TO {role}")
    for one in revoked:
        run(engine, f"REVOKE {one} FROM {role}")
    of_role = create_engine(engine.url.update_query_dict({"options": f"-csearch_path={schema} -crole={role}"}))
    try:
        yield of_role
    finally:
        of_role.dispose()
        run(engine, f"DROP OWNED BY {role}; DROP ROLE {role}")
