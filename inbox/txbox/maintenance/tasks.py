"""Tasks: what is removed from which table, by which statement, after which window."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from math import inf
from typing import Any

from txbox.inbox.age_judge import PRODUCER_SLACK
from txbox.maintenance.retention import Retention
from txbox.postgres.sql import quoted
from txbox.postgres.sql_files import SqlFile
from txbox.status.activity import KEPT_DAYS

SLACK = PRODUCER_SLACK
"""How long ids stay behind the horizon: producers' clocks may be ahead, and transactions begin before they record."""

GARBAGE = timedelta(days=1)
"""The age at which certain garbage goes: by then, whatever wrote it has ended."""


CURSORS = 8
"""Most cursors of one table, each of which looks at every block once.

Rows of other windows go with the next longer window, or within the day in which the whole table is swept.
"""


class SweeperStatements(SqlFile, file="sweeper.sql"):
    forget_ids: str
    count_ids: str
    forget_leases: str
    count_leases: str
    forget_results: str
    count_results: str
    forget_responses: str
    count_responses: str
    forget: str
    count: str
    old_failures: str
    forget_letters: str
    old_letters: str
    old_operations: str
    old_selections: str
    old_loads: str
    old_chunks: str
    old_relays: str
    old_workers: str
    old_activity: str
    old_actions: str
    blocks: str


@dataclass(frozen=True, slots=True)
class Task:
    """What is removed from a table.

    Attributes:
        name: the ``task`` in the table of maintenance.
        table: quoted, with its schema.
        forget: the statement that removes rows from a stretch of blocks.
        count: the statement that counts them.
        parameters: of both statements, besides the stretch.
    """

    name: str
    table: str
    forget: str
    count: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CursorTask(Task):
    """What is removed, behind cursors, from a table that grows for ever; ``forget`` also returns what is young.

    Attributes:
        windows: of the cursors, in seconds: one for each distinct window, at most ``CURSORS``.
    """

    windows: tuple[float, ...] = ()


def scan_tasks(kept: Retention, sql: SweeperStatements) -> Iterator[Task]:
    """Yield what is removed by going through whole tables."""
    # Failures come before ids are forgotten: a failure without its id would look like one that waits.
    for task, table, old, window in (
        ("failures", "message_failure", sql.old_failures, GARBAGE),
        ("letters", "dead_letter", sql.old_letters, kept.letters),
        ("operations", "dead_letter_operation", sql.old_operations, kept.operations),
        ("selections", "dead_letter_selection", sql.old_selections, kept.operations),
        ("loads", "bulk_load", sql.old_loads, kept.loads),
        ("chunks", "bulk_load_chunk", sql.old_chunks, GARBAGE),
        ("relays", "outbox_relay", sql.old_relays, GARBAGE),
        ("workers", "worker_report", sql.old_workers, GARBAGE),
        ("activity", "reported_activity", sql.old_activity, timedelta(days=KEPT_DAYS)),
        ("actions", "operator_action", sql.old_actions, kept.operations),
    ):
        if window is not None:
            name = quoted(getattr(sql.tables, table))
            statement = sql.forget_letters if task == "letters" else sql.forget
            forget, count = (text.replace("{table}", name).replace("{old}", old) for text in (statement, sql.count))
            yield Task(task, sql.name_of(table), forget, count, {"window": window.total_seconds()})


def cursor_tasks(
    kept: Retention,
    sql: SweeperStatements,
    inbox: Mapping[str, timedelta],
    leases: Mapping[str, timedelta],
    settled: Mapping[str, float] | None = None,
    *,
    responses: Mapping[str, timedelta],
) -> Iterator[CursorTask]:
    """Yield what is removed behind cursors.

    Args:
        kept: the other windows.
        sql: the statements.
        inbox: windows by subscriber.
        leases: windows by subscriber.
        settled: horizons that every running transaction can see, by subscriber, in seconds since 1970; nothing is
            removed for subscribers without one. None: only count.
        responses: windows of ids by subscriber, beyond which no response is kept, even if the inbox rotates.
    """
    every = None if kept.responses is None else kept.responses.total_seconds()
    if every is not None or responses:
        by_subscriber = {name: responses[name].total_seconds() for name in sorted(responses)}
        parameters = {"subscriber_ids": [*by_subscriber], "windows": [*by_subscriber.values()], "every": every}
        bounds = [every] if every is not None else []
        cursors = _of_cursors([*bounds, *(min([seconds, *bounds]) for seconds in by_subscriber.values())])
        table = sql.name_of("kept_response")
        yield CursorTask("responses", table, sql.forget_responses, sql.count_responses, parameters, cursors)
    if kept.results is not None:
        window = kept.results.total_seconds()
        table = sql.name_of("message_lease")
        yield CursorTask("results", table, sql.forget_results, sql.count_results, {"window": window}, (window,))
    for task, table, forget, count, windows in (
        ("leases", "message_lease", sql.forget_leases, sql.count_leases, leases),
        ("inbox", "processed_message", sql.forget_ids, sql.count_ids, inbox),
    ):
        if windows:
            by_name = {name: windows[name].total_seconds() for name in sorted(windows)}
            parameters = {
                "subscriber_ids": list(by_name),
                "windows": list(by_name.values()),
                "settled": [(settled or {}).get(name, -inf) for name in by_name],
                "slack": SLACK,
            }
            yield CursorTask(task, sql.name_of(table), forget, count, parameters, _of_cursors(by_name.values()))


def _of_cursors(windows: Iterable[float]) -> tuple[float, ...]:
    """Return the windows that get a cursor: all, or a few of them including the longest."""
    every = sorted(set(windows))
    count = min(len(every), CURSORS)
    return tuple(every[(number + 1) * len(every) // count - 1] for number in range(count))
