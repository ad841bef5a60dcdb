"""An upsert as the statement that the chunks apply: which columns the events have, and which the table."""

from dataclasses import replace

from sqlalchemy import Engine

from txbox import SqlEffect
from txbox.effects import Upsert
from txbox.postgres.transactions import short_transaction
from txbox_spark.options import ValidLoadOptions
from txbox_spark.reading.columns import CORRUPT_RECORD, MESSAGE_ID, types_as_wanted
from txbox_spark.runtime.lazy_imports import DataFrame
from txbox_spark.runtime.retries import retry_outages


@retry_outages
def with_upsert_as_statement(options: ValidLoadOptions, engine: Engine, events: DataFrame) -> ValidLoadOptions:
    """Return the options of a load with its ``Upsert``, if that is its effect, as a statement over ``fresh_event``.

    The column that is the message id is written if the table has it. Texts and arrays arrive as what the table's
    columns are, so that a value which Postgres does not take is named with its message; others arrive as what they are,
    and the statement casts them as an INSERT does.

    Raises:
        InvalidConfiguration: the table does not fit the events.
        RightsMissing: this user may not write to the table.
    """
    upsert = options.apply
    if not isinstance(upsert, Upsert):
        return options
    with short_transaction(engine) as connection:
        target = upsert.check(connection)
    if (fields := upsert.typed_fields) is not None:
        statement = upsert.statement(target, {name: one.of.name for name, one in fields.items()})
        return replace(options, apply=SqlEffect.of(statement, fields=fields))
    message_id = options.message_id
    if message_id in events.columns and all(one.name != message_id for one in target.columns):
        upsert = replace(upsert, ignore_columns=(*upsert.ignore_columns, message_id))  # it is not about the row
    given = dict(options.column_types or {})
    wanted = {one.name: one.type for one in target.columns if one.name not in given}
    declared, types = types_as_wanted(events.drop(CORRUPT_RECORD, MESSAGE_ID), wanted)
    statement = upsert.statement(target, {**types, **given})
    return replace(options, apply=statement, column_types={**declared, **given})
