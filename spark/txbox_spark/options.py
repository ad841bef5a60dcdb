"""The options of a bulk load: listed, documented and validated in one place.

The fields of ``ValidLoadOptions`` hold each option's type, default, valid values and command-line help.
`txbox bulk-load` is generated from them, and so are the options of format txbox that ``source_options`` names. A run's
``MergePlan`` inherits those of ``MergeOptions``.
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
"""SQL over the relation ``fresh_event``, as text or as an effect that publishes; or a callable of the connection.

It is sent to the executors, so it must be picklable, and the executors must have what it imports.
"""

WRITERS = AUTO, COPY, JDBC = "auto", "copy", "jdbc"

TABLE = "table:"
"""Prefix of a ``rejected_to`` that names a table."""

_MOST_REJECTED = re.compile(r"[0-9]+|(?:100(?:\.0+)?|[0-9]{1,2}(?:\.[0-9]+)?)%")

CHUNK_ROWS = 1_000_000
"""About how many rows a transaction merges at most."""

TIMES = ("timestamp with time zone", "timestamptz")
"""Postgres types that the column ``sent_at`` may have."""

ABANDONED_SECONDS = 24 * 3600.0
"""After so long without a heartbeat, txbox drops a run's staging table and forgets a batch that its stream left."""


class LoadOptions(TypedDict, total=False):
    """Keyword arguments of ``bulk_load`` and ``inbox_sink``; the first four are required.

    Attributes:
        url: the database, ``postgresql://user:password@host/name``; executors must reach it under this name.
        subscriber_id: the subscriber that the events are applied for. It has the name of the live workers' inbox.
        message_id: the column that holds the message id, or a Spark SQL expression that computes it. It must be the id
            that the live workers record.
        apply: the effect, one of: a ``txbox.SqlEffect``, whose fields are read from the columns by name or place and
            judged as workers judge them (with an outbox, it publishes in each chunk's transaction); a
            ``txbox_spark.Upsert`` into a table; SQL statements over the relation ``fresh_event``, which has the events'
            columns, and ``message_id`` as text; or a picklable callable that receives the transaction's SQLAlchemy
            connection, where it finds that relation. It runs in the transaction of each chunk that has events that are
            first. After a deadlock, which rolls back what it did, it may run again.
        schema: the Postgres schema of txbox's tables. None, the default, means the search path decides.
        prefix: what those tables' names start with; nothing by default.
        column_types: Postgres types of columns whose Spark type does not say enough, such as
            ``{"order_id": "uuid", "payload": "jsonb"}``.
        writer: "copy" (tasks copy and merge; executors need psycopg), "jdbc" (the driver merges a staging table), or
            "auto", the default: copy if the executors can. A stream chooses at its first batch.
        parallelism: how many chunks are merged at once. None, the default, means as many as Spark runs tasks.
        chunk_rows: about how many rows a transaction merges at most; ``CHUNK_ROWS`` by default.
        lock_seconds: about how long a transaction holds locks that workers may wait for. The size of a transaction
            follows from it. 0.5 by default. Longer is faster.
        stalled_seconds: how long a chunk's transaction may be idle, for example between two statements of a callable,
            before Postgres ends it; also how long a chunk waits for a lock before it releases its own. 120 by default.
        effects_seconds: how long a chunk waits for the same other chunk of the subscriber to apply its events before
            the load fails; 3,600 by default.
        executor_seconds: how long a Spark job on a cluster may have no executor before the load fails; 600 by default.
            Ignored with a local master.
        force: accept SQL that does not name ``fresh_event``.
        sent_at: the column with the time at which an event was sent, a timestamp with time zone. Events sent before the
            subscriber's horizon are counted as expired and not applied. None, the default, means that no column has the
            time. Times in ids that are UUIDs of version 7 always count.
        apply_expired: apply expired events, too. Those that were processed before the horizon are applied again, so use
            it only for events that were not.
        rejected_to: where to keep all rejected rows, each with its cause: a folder, for lines of JSON, or
            ``table:NAME``, a Postgres table, which is created if it does not exist. None, the default, means that they
            are only counted by cause, and a few are shown.
        max_rejected: how many rows may be rejected, as a number or as a share of all rows, such as ``"2.5%"``. If there
            are more, the load fails. Rows that can be rejected without Postgres are counted before the first event is
            applied. None, the default, means any number.
        keep: which of several rows with the same id to take: "latest:COLUMN" or "earliest:COLUMN", by a number, a date
            or a time, compared to the last digit, nulls last; or "any", the default. The report says how many ids have
            rows that differ.
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
    """What a field's type and default do not say about an option that may be given as text."""

    help: str  # of the command line; {} is the default
    metavar: str | None = None
    is_valid: Callable[[Any], bool] = lambda _: True
    must_be: str = ""
    least: int | None = None  # of a whole number

    def problem(self, name: str, value: Any) -> str | None:
        """Return what is wrong with a value, or None; ``name`` is what the caller calls the option."""
        if value is None or (self.is_valid(value) and (self.least is None or value >= self.least)):
            return None
        return f"{name} must be {self.must_be or f'at least {self.least}'}, not {value!r}"


def _option(default: Any, help: str, metavar: str | None = None, **rest: Any) -> Any:  # noqa: A002 - Option's
    return field(default=default, metadata={Option: Option(help, metavar, **rest)})


def _seconds(default: float, help: str) -> Any:  # noqa: A002
    return _option(default, help, is_valid=lambda n: 0 < n <= 24 * 3600, must_be="more than 0 and at most a day")


def is_limit(max_rejected: object) -> bool:
    """Return whether ``max_rejected`` is valid: a whole number, or at most 100 percent."""
    return _MOST_REJECTED.fullmatch(str(max_rejected)) is not None


def fields_of(apply: Apply | Upsert) -> Mapping[str, Field] | None:
    """Return the effect's fields, which judge events as a worker does; None if it takes the columns as they are."""
    if isinstance(apply, Upsert):
        return apply.typed_fields
    return apply.fields if isinstance(apply, SqlEffect) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeOptions:
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
    """Validated options with their defaults; the fields are those of ``LoadOptions``.

    Raises:
        InvalidConfiguration: an option is invalid.
    """

    abandoned_seconds: ClassVar[float] = ABANDONED_SECONDS

    of: str  # the function they are given to, for errors
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
        """Return the options that ``function`` is called with.

        Raises:
            TypeError: an option is unknown, or a required one is missing; the message names the function.
            InvalidConfiguration: an option is invalid.
        """
        for name in options:
            if name not in LoadOptions.__annotations__:
                raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        if missing := LoadOptions.__required_keys__ - options.keys():
            names = ", ".join(name for name in LoadOptions.__annotations__ if name in missing)
            raise TypeError(f"{function}() missing required keyword arguments: {names}")
        return cls(of=function, **options)

    def __post_init__(self) -> None:
        Inbox(self.subscriber_id)  # raises if the name is invalid
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
        """What is applied: an effect that publishes, or only its script; SQL; or a callable.

        An upsert has been turned into a statement before.
        """
        if isinstance(self.apply, Upsert):
            raise AssertionError("with_upsert_as_statement makes a statement of it before")
        return self.apply.script if isinstance(self.apply, SqlEffect) and not self.apply.publishes else self.apply

    @property
    def fields(self) -> Mapping[str, Field] | None:
        """The effect's fields; None if it takes the events' columns."""
        return fields_of(self.apply)

    def most_rejected(self, rows: int) -> int | None:
        """Return how many of this many rows may be rejected; None if any number may."""
        if self.max_rejected is None:
            return None
        number, percent, _ = str(self.max_rejected).partition("%")
        return int(rows * Decimal(number) / 100) if percent else int(number)

    def check_sent_at(self, columns: Sequence[EventColumn]) -> None:
        """Raise ``InvalidConfiguration`` unless ``sent_at`` is a time column of ``fresh_event``."""
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
        except Exception as error:  # pickling raises whatever the object raises
            raise InvalidConfiguration(
                f"{self.of}: apply cannot be sent to the executors, as it cannot be pickled: {error}"
            ) from error


@cache
def text_options() -> Mapping[str, tuple[Option, type[Any], Any]]:
    """Return the options that may be given as text, in the order of ``LoadOptions``, each with its type and default."""
    there = {one.name: (one.metadata.get(Option), one.type, one.default) for one in fields(ValidLoadOptions)}
    return {
        name: (option, next(one for one in (str, bool, float, int) if one in (get_args(type_) or (type_,))), default)
        for name in LoadOptions.__annotations__
        for option, type_, default in [there[name]]
        if option is not None
    }
