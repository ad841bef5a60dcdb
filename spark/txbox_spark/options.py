"""The options of a bulk load: listed, documented and validated once.

The fields of ``ValidLoadOptions`` have the type of each, its default, what it may be, and what the command line says of
it. `txbox bulk-load` and format txbox are made from them; a run's ``MergePlan`` inherits those of ``MergeOptions``.
``LoadOptions`` is for type checkers and readers; a test compares it with the fields.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from decimal import Decimal
from functools import cache
from typing import Any, ClassVar, Required, Self, TypedDict, get_args

from sqlalchemy import URL, Connection

from txbox import Inbox, InvalidConfiguration, SqlEffect
from txbox.effects import Field, Upsert
from txbox.postgres.urls import database_url
from txbox_spark.reading.columns import EventColumn
from txbox_spark.reading.row_order import ANY, is_known
from txbox_spark.runtime.executor_watcher import EXECUTOR_SECONDS

__all__ = ["ABANDONED_SECONDS", "CHUNK_ROWS", "LoadOptions"]

Apply = str | SqlEffect | Callable[[Connection], object]
"""SQL over the relation ``fresh_event``, also as an effect that publishes; or a callable that is given the connection.

It is sent to the executors, so it must be picklable, and what it imports must be there.
"""

WRITERS = AUTO, COPY, JDBC = "auto", "copy", "jdbc"

TABLE = "table:"
"""What a ``rejected_to`` that is a table begins with."""

_MOST_REJECTED = re.compile(r"[0-9]+|(?:100(?:\.0+)?|[0-9]{1,2}(?:\.[0-9]+)?)%")

CHUNK_ROWS = 1_000_000
"""Rows that a transaction merges, about, at most."""

TIMES = ("timestamp with time zone", "timestamptz")
"""Types of a column that tells when an event was sent."""

ABANDONED_SECONDS = 24 * 3600.0
"""After so long without a heartbeat, a run's staging table is dropped, and a batch that a stream has left forgotten."""


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
            that allows. 0.5 by default. Longer is faster.
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
    stalled_seconds: float
    effects_seconds: float
    executor_seconds: float
    force: bool
    sent_at: str | None
    apply_expired: bool
    rejected_to: str | None
    max_rejected: int | str | None
    keep: str


@dataclass(frozen=True, slots=True)
class Option:
    """What a field's type and default do not say of an option that may be given as text."""

    help: str  # of the command line; {} is the default
    metavar: str | None = None
    is_valid: Callable[[Any], bool] = lambda _: True
    must_be: str = ""
    least: int | None = None  # of a whole number

    def problem(self, name: str, value: Any) -> str | None:
        """Return what is wrong with a value, if anything is; ``name`` is what the caller has called the option."""
        if value is None or (self.is_valid(value) and (self.least is None or value >= self.least)):
            return None
        return f"{name} must be {self.must_be or f'at least {self.least}'}, not {value!r}"


def _option(default: Any, help: str, metavar: str | None = None, **rest: Any) -> Any:  # noqa: A002 - Option's
    return field(default=default, metadata={Option: Option(help, metavar, **rest)})


def _seconds(default: float, help: str) -> Any:  # noqa: A002
    return _option(default, help, is_valid=lambda n: 0 < n <= 24 * 3600, must_be="more than 0 and at most a day")


def is_limit(max_rejected: object) -> bool:
    """Return whether this says how many rows may be rejected: a number, or at most 100 percent."""
    return _MOST_REJECTED.fullmatch(str(max_rejected)) is not None


def fields_of(apply: Apply | Upsert) -> Mapping[str, Field] | None:
    """Return the fields of an effect, by which events are judged as a worker judges them; None: their columns are."""
    if isinstance(apply, Upsert):
        return apply.typed_fields
    return apply.fields if isinstance(apply, SqlEffect) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeOptions:
    """Those of a load that the merge of its chunks goes by."""

    subscriber_id: str
    schema: str | None = None
    prefix: str = ""
    lock_seconds: float = _seconds(0.5, "How long a transaction holds locks, about; by default {}. Longer is faster.")
    stalled_seconds: float = _seconds(
        120.0, "How long a chunk's transaction may do nothing, or wait for a lock; by default {}."
    )
    effects_seconds: float = _seconds(
        3600.0, "How long a chunk waits while one and the same other one applies events; by default {}."
    )
    sent_at: str | None = _option(None, "When an event was sent; too old ones are not applied.", "COLUMN")
    apply_expired: bool = _option(False, "Apply also what is too old to tell whether it was processed.")
    keep: str = _option(
        ANY,
        "Which of several rows with one message id is taken.",
        "any|latest:COLUMN|earliest:COLUMN",
        is_valid=is_known,
        must_be="any, latest:COLUMN or earliest:COLUMN",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidLoadOptions(MergeOptions):
    """Options that can work, with their defaults; the fields are those of ``LoadOptions``.

    Raises:
        InvalidConfiguration: when made, if something cannot work.
    """

    abandoned_seconds: ClassVar[float] = ABANDONED_SECONDS

    of: str  # what they are given to, for errors
    url: str | URL = field(repr=False)
    message_id: str
    apply: Apply | Upsert
    column_types: Mapping[str, str] | None = None
    writer: str = _option(
        AUTO,
        "copy: tasks COPY and merge; jdbc: over a staging table; auto: copy where executors can.",
        is_valid=WRITERS.__contains__,
        must_be=f"one of {', '.join(WRITERS)}",
    )
    parallelism: int | None = _option(None, "Chunks merged at once; by default as many as Spark runs tasks.", least=1)
    chunk_rows: int = _option(CHUNK_ROWS, "Rows that a transaction merges, about, at most; by default {}.", least=1)
    executor_seconds: float = _seconds(
        EXECUTOR_SECONDS, "How long to wait for an executor of a cluster while there is none; by default {}."
    )
    force: bool = _option(False, "Take statements that do not name fresh_event: a function of yours may.")
    rejected_to: str | None = _option(
        None,
        "Keep all rejected rows, each with its cause: as lines of JSON, or in a table of Postgres.",
        f"FOLDER|{TABLE}NAME",
        is_valid=lambda to: to.removeprefix(TABLE).strip() != "",
        must_be=f"a folder, or {TABLE}NAME",
    )
    max_rejected: int | str | None = _option(
        None,
        "Fail if more rows are rejected: 100, or 2.5%.",
        "N|P%",
        is_valid=is_limit,
        must_be="a number of rows, or a percentage such as 2.5%",
    )
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
        for name, (option, _, _) in text_options().items():
            if problem := option.problem(name, getattr(self, name)):
                raise InvalidConfiguration(f"{self.of}: {problem}")
        apply = self.apply
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
        return fields_of(self.apply)

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


@cache
def text_options() -> Mapping[str, tuple[Option, type[Any], Any]]:
    """Return the options that may be given as text, in the order of ``LoadOptions``: each with its type and default."""
    there = {one.name: (one.metadata.get(Option), one.type, one.default) for one in fields(ValidLoadOptions)}
    return {
        name: (option, next(one for one in (str, bool, float, int) if one in (get_args(type_) or (type_,))), default)
        for name in LoadOptions.__annotations__
        for option, type_, default in [there[name]]
        if option is not None
    }
