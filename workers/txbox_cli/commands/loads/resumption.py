"""``txbox loads resume``: what ``txbox bulk-load --resume`` does."""

import inspect
from typing import Any

from txbox.loads import BulkLoads
from txbox_cli.commands.bulk_load import bulk_load
from txbox_cli.commands.loads.details import WRITE_AGAIN
from txbox_cli.commands.loads.listing import RunArgument, find_run
from txbox_cli.errors import CommandFailed


def resume(*, run: RunArgument, **given: Any) -> None:
    """Finish a run: merge the chunks that are left. Name the same paths, and give the same options.

    It is refused if the events have other ids, or are of other files, than those that the run was begun with. The
    effect may be another one: what is merged is not merged again. Options that say how fast, such as --lock-seconds and
    --parallelism, may change, too.

    The ledger keeps no paths and no options; `txbox loads show` says what it knows of them.

    For example:

    \b
    txbox loads resume 4f a.jsonl b.jsonl --subscriber billing --message-id id \\
      --apply a.sql
    """
    db = given["db"]
    with db.engine() as engine:
        ledger = BulkLoads(engine, schema=db.schema, prefix=db.prefix)
        run_id = find_run(ledger, run)
        found = ledger.get(run_id)
    if found is not None and found[0].is_write:
        raise CommandFailed(f"run {run_id} is a write of Spark's format txbox, which is not resumed: {WRITE_AGAIN}")
    bulk_load(**given, resume=run_id)


_run, *_ = inspect.signature(resume).parameters.values()
_options = [option for option in inspect.signature(bulk_load).parameters.values() if option.name != "resume"]
resume.__signature__ = inspect.signature(resume).replace(parameters=[_run, *_options])  # type: ignore[attr-defined]
