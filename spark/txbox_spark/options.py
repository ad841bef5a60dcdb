"""The options of ``bulk_load`` and ``inbox_sink``: listed, documented and validated once.

The first class types the keyword arguments; the second one holds their defaults, and refuses what cannot work.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Required, Self, TypedDict

from sqlalchemy import URL

from txbox import Inbox, InvalidConfiguration, SqlEffect
from txbox.effects import Field, Upsert
from txbox.postgres.urls import database_url
from txbox_spark.merging.effects.effect_runner import Apply
from txbox_spark.merging.merge_plan import EFFECTS_SECONDS, STALLED_SECONDS
from txbox_spark.merging.merge_sizer import LOCK_SECONDS
from txbox_spark.reading.columns import EventColumn
from txbox_spark.reading.row_order import ANY, is_known
from txbox_spark.runtime.executor_watcher import EXECUTOR_SECONDS

__all__ = ["ABANDONED_SECONDS", "CHUNK_ROWS", "LoadOptions"]

WRITERS = AUTO, COPY, JDBC = "auto", "copy", "jdbc"

TABLE = "table:"
"""What a ``rejected_to`` that is a table begins with."""

_MOST_REJECTED = re.compile(r"[0-9]+|(?:100(?:\.0+)?|[0-9]{1,2}(?:\.[0-9]+)?)%")

CHUNK_ROWS = 1_000_000
"""Rows that a transaction merges, about, at most."""

TIMES = ("timestamp with time zone", "timestamptz")
"""Types of a column that tells when an event was sent."""

ABANDONED_SECONDS = 24 * 3600.0
"""After so long without a heartbeat, a run's staging table is dropped."""


class LoadOptions(TypedDict, total=False):
    """Keyword arguments of ``bulk_load`` and ``inbox_sink``; the first four are required.

    Attributes:
        url: the database, ``postgresql://user:password@host/name``; executors must reach it under this name.
        subscriber_id: the subscriber that the events are applied for: the name that the live workers' inbox has.
        message_id: the column that holds the message id, or an expression of Spark SQL that makes it; it must be what
            the live workers record.
        apply: the effect: a ``txbox.SqlEffect``, whose fields are then the columns, by name or place, judged as workers
            judge them (with an outbox, it publishes in each chunk's transaction); or a ``txbox_spark.Upsert`` into a
            table; or SQL statements over the relation ``fresh_event``, which has the events' columns, and
            ``message_id`` as text; or a picklable callable that is given the transaction's SQLAlchemy connection, in
            which that relation is. It runs in the transaction of each chunk that has events that are first, and may run
            again after a deadlock, when what it did is rolled back.
        schema: the Postgres schema that holds txbox's tables; None, the default, leaves it to the search path.
        prefix: what those tables' names start with; nothing by default.
        column_types: Postgres types of columns, where Spark's own type does not say enough, such as
            ``{"order_id": "uuid", "payload": "jsonb"}``.
        writer: "copy" (tasks copy and merge; executors need psycopg), "jdbc" (a staging table, merged by the driver),
            or "auto", the default: copy where the executors can. A stream chooses at its first batch.
        parallelism: how many chunks are merged at once; None, the default: as many as Spark runs tasks.
        chunk_rows: rows that a transaction merges, about, at most; ``CHUNK_ROWS`` by default.
        lock_seconds: how long a transaction holds the locks that workers may wait for, about; it takes as many rows as
            that allows. 0.25 by default. Longer is faster.
        abandoned_seconds: after so long without a heartbeat, other runs' staging tables are dropped, and batches that
            other streams have left are forgotten; ``ABANDONED_SECONDS`` by default.
        stalled_seconds: how long a chunk's transaction may do nothing, between two statements of a callable, say,
            before Postgres ends it; and how long a chunk waits for a lock before it releases its own. 120 by default.
        effects_seconds: how long a chunk waits for one and the same other chunk of the subscriber to apply its events,
            before the load fails; 3,600 by default.
        executor_seconds: how long a job of Spark may have no executor on a cluster, before the load fails; 600 by
            default. With a local master it means nothing.
        force: take SQL that does not name ``fresh_event``.
        sent_at: the column that has when an event was sent, a timestamp with time zone; what was sent before the
            subscriber's horizon is counted as expired, and not applied. None, the default: no column has. Times in ids
            that are UUIDs of version 7 count in any case.
        apply_expired: apply such events, too. Those that were processed before the horizon are applied once more, so
            say it only of events that were not.
        rejected_to: where all rejected rows are kept, each with its cause: a folder, which gets lines of JSON, or
            ``table:NAME``, a table in Postgres, which is created unless it is there. None, the default: they are
            counted by their causes, and some are shown.
        max_rejected: how many rows may be rejected, as a number or as ``"2.5%"`` of all; more of them end the load.
            What the rows alone tell is counted before the first event is applied. None, the default: any number.
        keep: which of several rows with one id is taken: "latest:COLUMN", "earliest:COLUMN", by a number, a date or a
            time, to its last digit, nulls last; or "any", the default. How many ids have rows that differ is in the
            report.
    """

    url: Required[str | URL]
    subscriber_id: Required[str]
    message_id: Required[str]
    apply: Required[Apply | Upsert]
    schema: str | None
    prefix: str
    column_types: Mapping[str, str] | None
    writer: str
    parallelism: int | None
    chunk_rows: int
    lock_seconds: float
    abandoned_seconds: float
    stalled_seconds: float
    effects_seconds: float
    executor_seconds: float
    force: bool
    sent_at: str | None
    apply_expired: bool
    rejected_to: str | None
    max_rejected: int | str | None
    keep: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidLoadOptions:
    """Options that can work, with their defaults; the fields are those of ``LoadOptions``.

    Raises:
        InvalidConfiguration: when made, if something cannot work.
    """

    of: str  # what they are given to, for errors
    url: str | URL = field(repr=False)
    subscriber_id: str
    message_id: str
    apply: Apply | Upsert
    schema: str | None = None
    prefix: str = ""
    column_types: Mapping[str, str] | None = None
    writer: str = AUTO
    parallelism: int | None = None
    chunk_rows: int = CHUNK_ROWS
    lock_seconds: float = LOCK_SECONDS
    abandoned_seconds: float = ABANDONED_SECONDS
    stalled_seconds: float = STALLED_SECONDS
    effects_seconds: float = EFFECTS_SECONDS
    executor_seconds: float = EXECUTOR_SECONDS
    force: bool = False
    sent_at: str | None = None
    apply_expired: bool = False
    rejected_to: str | None = None
    max_rejected: int | str | None = None
    keep: str = ANY
    database: URL = field(init=False)  # the URL with its driver

    @classmethod
    def given_to(cls, function: str, options: LoadOptions) -> Self:
        """Return the options that a function is called with.

        Raises:
            TypeError: one is unknown, or a required one is missing; the message names the function.
            InvalidConfiguration: something cannot work.
        """
        for name in options:
            if name not in LoadOptions.__annotations__:
                raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        if missing := LoadOptions.__required_keys__ - options.keys():
            names = ", ".join(name for name in LoadOptions.__annotations__ if name in missing)
            raise TypeError(f"{function}() missing required keyword arguments: {names}")
        return cls(of=function, **options)

    def __post_init__(self) -> None:
        Inbox(self.subscriber_id)  # refuses a name that cannot be kept
        object.__setattr__(self, "database", database_url(self.url))
        apply, parallelism = self.apply, self.parallelism
        self._require(self.writer in WRITERS, f"writer must be one of {', '.join(WRITERS)}, not {self.writer!r}")
        self._require(parallelism is None or parallelism >= 1, f"parallelism must be at least 1, not {parallelism!r}")
        self._require(self.chunk_rows >= 1, f"chunk_rows must be at least 1, not {self.chunk_rows!r}")
        self._require(
            self.max_rejected is None or is_limit(str(self.max_rejected)),
            f"max_rejected must be a number of rows, or such as '2.5%', not {self.max_rejected!r}",
        )
        self._require(
            self.rejected_to is None or self.rejected_to.removeprefix(TABLE).strip() != "",
            f"rejected_to must be a folder, or {TABLE}NAME, not {self.rejected_to!r}",
        )
        self._require(is_known(self.keep), f"keep must be any, latest:COLUMN or earliest:COLUMN, not {self.keep!r}")
        for name in ("lock_seconds", "stalled_seconds", "effects_seconds", "executor_seconds"):
            seconds = getattr(self, name)
            self._require(0 < seconds <= 24 * 3600, f"{name} must be more than 0 and at most a day, not {seconds!r}")
        self._require(
            self.fields is None or not self.column_types,
            "column_types are for statements without fields; fields, of a SqlEffect or an Upsert, have types",
        )
        if isinstance(apply, Upsert):
            return
        if isinstance(apply, SqlEffect) or callable(apply):
            self._require_picklable(apply)
            return
        self._require(isinstance(apply, str), f"apply must be SQL or a callable, not {apply!r}")
        self._require(bool(apply.strip()), "apply must be SQL or a callable; it is empty")
        self._require(
            self.force or "fresh_event" in apply.lower(),
            "apply does not name fresh_event, so the events would be recorded without effect; if that is meant, or a "
            "function does it, say so: force=True (on the command line: --force)",
        )

    @property
    def statements(self) -> Apply:
        """What is applied: of an effect its script alone, unless that publishes. An upsert is a statement by then."""
        if isinstance(self.apply, Upsert):
            raise AssertionError("with_upsert_as_statement makes a statement of it before")
        return self.apply.script if isinstance(self.apply, SqlEffect) and not self.apply.publishes else self.apply

    @property
    def fields(self) -> Mapping[str, Field] | None:
        """The fields of the effect; None: the columns of the events."""
        if isinstance(self.apply, Upsert):
            return self.apply.typed_fields
        return self.apply.fields if isinstance(self.apply, SqlEffect) else None

    def most_rejected(self, rows: int) -> int | None:
        """Return how many of so many rows may be rejected; None: any number."""
        if self.max_rejected is None:
            return None
        number, percent, _ = str(self.max_rejected).partition("%")
        return int(rows * Decimal(number) / 100) if percent else int(number)

    def check_sent_at(self, columns: Sequence[EventColumn]) -> None:
        """Raise ``InvalidConfiguration`` if ``sent_at`` is none of the columns of ``fresh_event`` that are a time."""
        types = {column.name: column.postgres_type for column in columns}
        self._require(
            self.sent_at is None or types.get(self.sent_at) in TIMES,
            "sent_at must name a column of the events that is a timestamp with time zone; "
            f"{self.sent_at!r} is {types.get(self.sent_at or '', 'none of them')}",
        )

    def _require(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise InvalidConfiguration(f"{self.of}: {otherwise}")

    def _require_picklable(self, apply: object) -> None:
        from pyspark.cloudpickle import dumps

        try:
            dumps(apply)  # type: ignore[no-untyped-call]
        except Exception as error:  # what pickling raises is whatever the object raises
            raise InvalidConfiguration(
                f"{self.of}: apply cannot be sent to the executors, as it cannot be pickled: {error}"
            ) from error


def is_limit(max_rejected: str) -> bool:
    """Return whether a text says how many rows may be rejected: a number, or at most 100 percent."""
    return _MOST_REJECTED.fullmatch(max_rejected) is not None
