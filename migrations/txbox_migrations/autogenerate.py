"""Keep a host's ``alembic revision --autogenerate`` away from our tables."""

from alembic import context
from alembic.runtime.environment import IncludeObjectFn, NameFilterType
from sqlalchemy.schema import SchemaItem, Table

from txbox.schema import TABLE_NAMES, VIEW_NAME, is_generation, is_staging
from txbox_migrations.environment import VERSION_TABLE


def include_object(schema: str | None = None, prefix: str = "", also: IncludeObjectFn | None = None) -> IncludeObjectFn:
    """Return the filter for ``context.configure(include_object=…)`` in a host's env.py.

    With it, autogenerate neither drops nor alters our tables, including ``txbox_version``, the staging tables of bulk
    loads and the generations of a rotating inbox.

    Args:
        schema: the schema of our tables; None: the connection's default schema.
        prefix: the prefix of their names.
        also: the host's own filter, called for everything that is not ours.

    Returns:
        The filter.
    """
    ours = {f"{prefix}{name}" for name in (*TABLE_NAMES, VIEW_NAME, VERSION_TABLE)}

    def include(
        item: SchemaItem, name: str | None, type_: NameFilterType, reflected: bool, compare_to: SchemaItem | None
    ) -> bool:
        table = item if isinstance(item, Table) else getattr(item, "table", None)
        is_ours = table is not None and any(
            (table.name in ours, is_staging(table.name, prefix), is_generation(table.name, prefix))
        )
        if table is not None and is_ours and _same_schema(table.schema, schema):
            return False
        return also is None or also(item, name, type_, reflected, compare_to)

    return include


def _same_schema(found: str | None, wanted: str | None) -> bool:
    """Compare two schemas, either of which may name the connection's default schema or leave it out."""
    try:
        default = context.get_context().dialect.default_schema_name
    except (
        NameError,
        AttributeError,
    ):  # no env.py is running, as under compare_metadata(): none ever did, or one did before
        default = None
    return (found or default) == (wanted or default)
