"""Reads events from sources other than files: tables of Spark's catalogs, Delta, Iceberg, and databases over JDBC.

::

    table:NAME      a table or a view of a catalog: table:archive.purchases
    delta:PATH      a table of Delta Lake, by its folder
    iceberg:NAME    a table of Iceberg, by its name in a catalog, or by its folder
    jdbc:URL        a database, with the option dbtable or query

The session must have the jars and catalogs that Spark needs for them. A run of such a source cannot be recognized by
its files. It can be resumed with a source of the same name and columns, if the message ids are the same.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import cast

from txbox_spark.reading.errors import SourceError, explained
from txbox_spark.reading.sources import EventSource
from txbox_spark.runtime.jdbc import JDBC_DRIVER_CLASS
from txbox_spark.runtime.lazy_imports import DataFrame, SparkSession
from txbox_spark.runtime.session import require_jdbc_driver

KINDS = ("table", "delta", "iceberg", "jdbc")

FETCHED_ROWS = "10000"
"""Rows that a JDBC driver fetches at a time; by default, the Postgres driver fetches all of them at once."""

POSTGRES = "jdbc:postgresql:"


def check_source(source: str, options: Mapping[str, str]) -> str:
    """Return the kind of a source; raise ``SourceError`` if it is invalid, as far as that shows without Spark."""
    kind, colon, place = source.partition(":")
    if not colon or kind not in KINDS or not place:
        kinds = "table:NAME, delta:PATH, iceberg:NAME or jdbc:URL"
        raise SourceError(f"a source is {kinds}, not {without_secrets(source)!r}; files are given by their paths")
    if kind == "jdbc" and len(_chosen(options)) != 1:
        raise SourceError(
            f"{without_secrets(source)} needs the option dbtable=NAME, or query=SELECT …, and not both of them"
        )
    return kind


def read_source(
    spark: SparkSession, source: str, *, options: Mapping[str, str] | None = None
) -> tuple[DataFrame, EventSource]:
    """Read events from a table or a database.

    A bulk load reads the events twice, so they must not change meanwhile: name a snapshot (``versionAsOf`` of Delta,
    ``snapshot-id`` of Iceberg), or write the query so that it leaves out what may still be written.

    Args:
        spark: the session, with the jars and catalogs that the source needs.
        source: such as ``table:archive.purchases``.
        options: options of Spark's reader. With ``jdbc:``, they say what to read and how: dbtable or query, user,
            password, driver, partitionColumn with lowerBound, upperBound and numPartitions.

    Returns:
        The events, and the ``source`` to pass to ``bulk_load``, which has no secrets.

    Raises:
        SourceError: the source cannot be read.
        SparkSetupError: the source is a Postgres database, and Spark has no JDBC driver for it.
    """
    given = dict(options or {})
    kind = check_source(source, given)
    name = without_secrets(source)
    if kind == "jdbc":
        ((option, what),) = _chosen(given).items()
        name = f"{name} ({option}={what})"
        given = {"fetchsize": FETCHED_ROWS, **given, "url": source}
        if source.startswith(POSTGRES):
            require_jdbc_driver(spark)
            given.setdefault("driver", JDBC_DRIVER_CLASS)
    place = source.partition(":")[2]
    reader = spark.read.options(**given)
    try:
        with explained(f"cannot read {name}"):
            if kind == "table":
                frame = reader.table(place)
            else:
                frame = reader.format(kind).load() if kind == "jdbc" else reader.format(kind).load(place)
            columns = frame.schema.json()
    except SourceError as error:
        # A driver quotes the URL that it cannot read, so drop the cause, which has Java's stack.
        why = without_secrets(str(error))
        raise SourceError(why + (_REMEDIES[kind] if _MISSING.search(why) else "")) from None
    return frame, EventSource(name, hashlib.sha256(json.dumps([name, columns]).encode()).digest())


def without_secrets(text: str) -> str:
    """Return a text without the passwords of the URLs in it, in linear time."""
    shown, done, end, at = [], 0, 0, -1
    for user in _USER.finditer(text):
        password = user.end(1)
        if password >= end:  # beyond the part that was already searched for its last @
            end = cast("re.Match[str]", _PASSWORD.match(text, password)).end()
            at = text.rfind("@", password, end)
        if user.start() >= done and at > password:
            shown += [text[done:password], "***"]
            done = at
    return _IN_PARAMETER.sub(r"\1***", "".join([*shown, text[done:]]))


def _chosen(options: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in options.items() if name.lower() in ("dbtable", "query")}


_REMEDIES = {
    "table": "; name the catalog and its jars: settings spark.sql.catalog.… and spark.jars.packages",
    "delta": "; Spark needs its jars: setting spark.jars.packages=io.delta:delta-spark_2.13:VERSION",
    "iceberg": "; Spark needs its jars: setting spark.jars.packages=org.apache.iceberg:iceberg-spark-runtime-…:VERSION",
    "jdbc": "; the driver is a jar: setting spark.jars.packages, and option driver=CLASS",
}
_MISSING = re.compile("NOT_FOUND|No suitable driver|ClassNotFound")
"""What Spark says if a catalog, a jar or a driver is missing."""
_USER = re.compile(r"(?=((?://|thin:)[^\s/:@]*[:/]))")
_PASSWORD = re.compile(r"[^\s?]*")
"""user:password@host; Oracle has user/password@. They may overlap: ///x:y@z."""
_IN_PARAMETER = re.compile(
    r"(\b(?=\w*?(?:password|passphrase|pwd|secret|token|accesskey))\w++=)[^\s&;,'\"]+", re.IGNORECASE
)
