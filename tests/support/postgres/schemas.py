"""Schemas with txbox's tables for the tests, each handed out clean.

Making the tables anew takes four times as long as removing what a test left in them. So a schema goes to another test
if its structure is as it was made; any other change shows in the system catalogs, and such a schema is dropped.

Half of the tests have the tables of ``Business`` beside ours: such schemas are kept by themselves, with those tables.
"""

import itertools
import uuid
from collections import deque
from functools import cache

from sqlalchemy import Connection, Engine
from sqlalchemy.schema import DropSchema

from support.postgres.tables import table_statements
from support.workers import business
from txbox.schema import tables

SPARE = 4
"""How many clean schemas wait in turn: a thread that outlives its test soon ends, and meets no other test."""

FOREIGN = """
SELECT coalesce(string_agg(format('%%I.%%I', nspname, relname), ', '), '')
FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
WHERE nspname = %(schema)s AND relkind IN ('r', 'p') AND NOT relispartition AND relname <> ALL (%(ours)s)
"""
"""The tables that are not ours."""

# A change of an object leaves another xmin on its rows. So does TRUNCATE in pg_class, where only what counts is read.
# ANALYZE leaves its estimate there, on an empty table too.
STRUCTURE = """
WITH place AS (SELECT oid FROM pg_namespace WHERE nspname = %(schema)s),
relation AS (SELECT pg_class.* FROM pg_class JOIN place ON relnamespace = place.oid),
object (kind, oid, version) AS (
  SELECT 'class', relation.oid, concat_ws(' ', relname, relowner, relacl, reloptions, relpersistence, relreplident,
    relhastriggers, relhasrules, relrowsecurity, relchecks, relnatts, reltablespace, relam,
    CASE WHEN relkind = 'r' AND pg_relation_size(relation.oid) = 0 THEN reltuples ELSE -1 END) FROM relation
  UNION ALL SELECT 'attribute', attrelid, string_agg(pg_attribute.xmin::text, ' ' ORDER BY attnum)
    FROM pg_attribute JOIN relation ON attrelid = relation.oid GROUP BY attrelid
  UNION ALL SELECT 'default', pg_attrdef.oid, pg_attrdef.xmin::text
    FROM pg_attrdef JOIN relation ON adrelid = relation.oid
  UNION ALL SELECT 'constraint', pg_constraint.oid, pg_constraint.xmin::text
    FROM pg_constraint JOIN relation ON conrelid = relation.oid
  UNION ALL SELECT 'index', indexrelid, pg_index.xmin::text FROM pg_index JOIN relation ON indexrelid = relation.oid
  UNION ALL SELECT 'trigger', pg_trigger.oid, pg_trigger.xmin::text
    FROM pg_trigger JOIN relation ON tgrelid = relation.oid
  UNION ALL SELECT 'rule', pg_rewrite.oid, pg_rewrite.xmin::text
    FROM pg_rewrite JOIN relation ON ev_class = relation.oid
  UNION ALL SELECT 'policy', pg_policy.oid, pg_policy.xmin::text FROM pg_policy JOIN relation ON polrelid = relation.oid
  UNION ALL SELECT 'sequence', seqrelid, pg_sequence.xmin::text
    FROM pg_sequence JOIN relation ON seqrelid = relation.oid
  UNION ALL SELECT 'function', pg_proc.oid, pg_proc.xmin::text FROM pg_proc JOIN place ON pronamespace = place.oid
  UNION ALL SELECT 'type', pg_type.oid, pg_type.xmin::text FROM pg_type JOIN place ON typnamespace = place.oid
  UNION ALL SELECT 'statistics', pg_statistic_ext.oid, pg_statistic_ext.xmin::text
    FROM pg_statistic_ext JOIN place ON stxnamespace = place.oid
  UNION ALL SELECT 'schema', pg_namespace.oid, pg_namespace.xmin::text FROM pg_namespace JOIN place USING (oid)
)
SELECT (SELECT md5(string_agg(concat_ws(' ', kind, oid, version), ',' ORDER BY kind, oid)) FROM object) AS digest,
  coalesce(array_agg(relname::text) FILTER (WHERE relkind = 'r' AND pg_relation_size(oid) > 0), '{}') AS filled
FROM relation
"""

RESTART = """
SELECT setval(seqrelid::regclass, seqstart, false)
FROM pg_sequence JOIN pg_class ON pg_class.oid = seqrelid JOIN pg_namespace ON pg_namespace.oid = relnamespace
WHERE nspname = '{schema}'
"""

END_USERS = """
SELECT pg_terminate_backend(pid) FROM pg_locks JOIN pg_class ON pg_class.oid = relation
WHERE relnamespace = %(schema)s::regnamespace AND pid <> pg_backend_pid()
"""


@cache
def our_tables() -> list[str]:
    return [table.name for table in tables().metadata.sorted_tables]


class Schemas:
    """Schemas of one database, for one test after the other.

    Args:
        engine: commits each statement by itself.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._numbers = itertools.count(1)
        self._clean: dict[bool, deque[str]] = {False: deque(), True: deque()}
        self._as_made: dict[str, str] = {}
        self._with_business: set[str] = set()

    def take(self, *, with_business: bool = False) -> str:
        """Return the name of a schema that has our tables, and maybe those of ``Business``, all of them empty."""
        if len(clean := self._clean[with_business]) >= SPARE:
            return clean.popleft()
        name = f"test_{next(self._numbers)}_{uuid.uuid4().hex[:8]}"
        made = [f"CREATE SCHEMA {name}", f"SET LOCAL search_path = {name}", table_statements()]
        if with_business:
            made.append(business.TABLES)
            self._with_business.add(name)
        with self._engine.connect() as connection:  # several statements in one call are one transaction
            connection.exec_driver_sql(";".join(made))
            self._as_made[name], _ = self._look(connection, name)
        return name

    def give_back(self, name: str) -> None:
        """End the sessions that use a schema, and clean it for another test, or drop it."""
        with self._engine.connect() as connection:
            # What a test left open must not keep the next one waiting.
            connection.exec_driver_sql(END_USERS, {"schema": name})
            if self._cleaned(connection, name):
                self._clean[name in self._with_business].append(name)
            else:
                del self._as_made[name]
                self._with_business.discard(name)
                connection.execute(DropSchema(name, cascade=True, if_exists=True))

    def _cleaned(self, connection: Connection, name: str) -> bool:
        kept = business.NAMES if name in self._with_business else []
        values = {"schema": name, "ours": our_tables() + kept}
        if foreign := connection.exec_driver_sql(FOREIGN, values).scalar_one():
            connection.exec_driver_sql(f"DROP TABLE {foreign} CASCADE".replace("%", "%%"))
        digest, filled = self._look(connection, name)
        if digest != self._as_made[name]:
            return False
        connection.exec_driver_sql(RESTART.format(schema=name))
        if filled:  # a DELETE would leave dead rows, which the status counts
            connection.exec_driver_sql(f"TRUNCATE {', '.join(f'{name}.{table}' for table in filled)} CASCADE")
        return True

    def _look(self, connection: Connection, name: str) -> tuple[str, list[str]]:
        digest, filled = connection.exec_driver_sql(STRUCTURE, {"schema": name}).one()
        return digest, filled
