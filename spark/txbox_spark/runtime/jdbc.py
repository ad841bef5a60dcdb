"""Translates a database URL into options of Spark's JDBC reader and writer.

psycopg takes libpq's parameters, and the JDBC driver has its own. Executors run on other machines, so nothing may come
from this machine's environment: the URL must have host and user, and files such as ``sslrootcert`` must exist on the
executors.

JDBC driver: https://jdbc.postgresql.org/documentation/use/#connection-parameters
libpq: https://www.postgresql.org/docs/current/libpq-connect.html#LIBPQ-PARAMKEYWORDS
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from urllib.parse import quote

from psycopg.sql import Literal
from sqlalchemy import URL
from sqlalchemy.dialects.postgresql.psycopg import dialect as psycopg_dialect
from sqlalchemy.exc import ArgumentError

from txbox import InvalidConfiguration
from txbox.postgres.urls import database_url
from txbox_spark.runtime.explanations import ABOUT_DATA
from txbox_spark.runtime.lazy_imports import DataFrame, SparkSession

JDBC_DRIVER_CLASS = "org.postgresql.Driver"

DEFAULT_PORT = "5432"


def jdbc_options(url: URL, *, prepare: bool = True, idle_seconds: float | None = None) -> dict[str, str]:
    """Return the options of Spark's JDBC reader and writer for a database URL.

    Args:
        url: the database, as SQLAlchemy and psycopg take it.
        prepare: whether the driver may keep prepared statements, unless the URL forbids it.
        idle_seconds: how long a transaction may be idle before the server ends its session, unless the URL's
            ``options`` set it. None means the server's setting. A pooler may refuse it.

    Returns:
        ``url``, ``driver``, ``user`` and, if the URL has them, ``password`` and ``sslpassword``. Secrets are never in
        ``url``, because Spark shows it in its plans and its web UI.

    Raises:
        InvalidConfiguration: JDBC cannot reach the database, or has no counterpart for one of the URL's parameters,
            such as a certificate check. Parameters that only tune libpq's socket are left out.
    """
    parameters = _libpq_parameters(url)
    if "user" not in parameters:
        raise InvalidConfiguration("the database URL names no user, and Spark's executors know of none; name one")
    options = {"driver": JDBC_DRIVER_CLASS, "user": parameters.pop("user")}
    options |= {name: parameters.pop(name) for name in ("password", "sslpassword") if name in parameters}
    addresses = _addresses(parameters.pop("host", ""), parameters.pop("port", ""))
    database = parameters.pop("dbname", options["user"])
    if not database.strip("."):
        raise InvalidConfiguration(f"a database named {database!r} cannot be reached over JDBC; rename it")
    if not prepare:
        parameters["prepare_threshold"] = "None"
    if idle_seconds is not None:  # comes first, because the last of two settings with the same name wins
        bound = f"-c idle_in_transaction_session_timeout={round(idle_seconds * 1000)}"
        parameters["options"] = f"{bound} {parameters.get('options', '')}".strip()
    trusts_system = parameters.get("sslrootcert") == "system"  # to libpq, the system's authorities instead of a file
    if trusts_system:
        del parameters["sslrootcert"]
        if parameters.setdefault("sslmode", "verify-full") != "verify-full":
            raise InvalidConfiguration("the database URL has sslrootcert=system, which goes with sslmode=verify-full")
    query = "&".join(f"{name}={quote(value, safe='')}" for name, value in _translated(parameters).items())
    if trusts_system:  # use the authorities that Java trusts
        query += "&sslfactory=org.postgresql.ssl.DefaultJavaSSLFactory"
    options["url"] = f"jdbc:postgresql://{addresses}/{quote(database, safe='')}" + (f"?{query}" if query else "")
    return options


def is_about_data(error: Exception) -> bool:
    """Return whether Postgres refused a value, judged by the SQLSTATE of the driver's error in a Spark error."""
    java = getattr(error, "java_exception", None) or getattr(error, "_origin", None)  # Py4JJavaError, PySparkException
    while java is not None:
        if java.getClass().getName() in _WITH_A_CODE:
            return str(java.getSQLState())[:2] in ABOUT_DATA
        java = java.getCause()
    return False


def _libpq_parameters(url: URL) -> dict[str, str]:
    """Return psycopg's parameters, so that every way to write hosts in a URL means the same as for psycopg."""
    try:
        _, given = psycopg_dialect().create_connect_args(database_url(url))  # type: ignore[no-untyped-call]
    except (ArgumentError, ValueError) as error:
        raise InvalidConfiguration(f"the database URL cannot be used: {error}") from error
    parameters = {}
    for name, value in given.items():
        if not isinstance(value, str | int):
            raise InvalidConfiguration(f"the database URL gives {name} more than once; give it once")
        parameters[name] = str(value)
    return parameters


def _addresses(hosts: str, ports: str) -> str:
    """Return hosts with their ports; a single port applies to all hosts."""
    names = hosts.split(",")
    numbers = ports.split(",")
    if len(numbers) == 1:
        numbers *= len(names)
    if len(names) != len(numbers):
        raise InvalidConfiguration(
            f"the database URL has {len(names)} hosts and {len(numbers)} ports; give each a port"
        )
    for name in names:
        if not name:
            raise InvalidConfiguration(f"the database URL names no host; {_NEEDS_TCP}")
        if name.startswith(("/", "@")):
            raise InvalidConfiguration(f"the database URL names the Unix socket {name}; {_NEEDS_TCP}")
        if set(name) & set("/?#&[]@ "):
            raise InvalidConfiguration(f"the database URL names {name!r}, which is no host; {_NEEDS_TCP}")
    bracketed = [f"[{name}]" if ":" in name else name for name in names]
    return ",".join(f"{name}:{number or DEFAULT_PORT}" for name, number in zip(bracketed, numbers, strict=True))


def _translated(parameters: Mapping[str, str]) -> dict[str, str]:
    """Return the JDBC driver's parameters for those of libpq."""
    translated = {}
    for name, value in parameters.items():
        if name in _LEFT_OUT:
            continue
        if name not in _TRANSLATIONS:
            raise InvalidConfiguration(
                f"the database URL has {name}, for which the JDBC driver has no counterpart; leave it out for Spark"
            )
        other, translate = _TRANSLATIONS[name]
        try:
            translated[other] = translate(value)
        except (KeyError, ValueError) as error:
            raise InvalidConfiguration(
                f"the database URL has {name}={value}, for which the JDBC driver has no counterpart"
            ) from error
    return translated


def _seconds(value: str) -> str:
    # libpq waits for ever at zero and below, the driver only at zero.
    return str(max(int(value), 0))


def _prepare_threshold(value: str) -> str:
    # psycopg's None is 0 for the driver. psycopg's 0 means to prepare at once, but nobody who writes 0 means that.
    return "0" if value.strip().lower() in ("none", "") else str(int(value))


_NEEDS_TCP = "Spark reaches Postgres over JDBC, which needs TCP: give postgresql://user:password@host:5432/database"

_TRANSLATIONS: Mapping[str, tuple[str, Callable[[str], str]]] = {
    **{name: (name, str) for name in ("options", "sslmode", "sslrootcert", "sslcert", "sslkey")},
    "application_name": ("ApplicationName", str),
    "channel_binding": ("channelBinding", str),
    "connect_timeout": ("connectTimeout", _seconds),
    "gssencmode": ("gssEncMode", str),
    "keepalives": ("tcpKeepAlive", {"0": "false", "1": "true"}.__getitem__),
    "prepare_threshold": ("prepareThreshold", _prepare_threshold),
    "prepareThreshold": ("prepareThreshold", _prepare_threshold),
    "krbsrvname": ("kerberosServerName", str),
    "load_balance_hosts": ("loadBalanceHosts", {"disable": "false", "random": "true"}.__getitem__),
    "sslnegotiation": ("sslNegotiation", str),
    "target_session_attrs": (
        "targetServerType",
        {
            "any": "any",
            "primary": "primary",
            # The driver calls a server that accepts writes primary.
            "read-write": "primary",
            "standby": "secondary",
            "read-only": "secondary",
            "prefer-standby": "preferSecondary",
        }.__getitem__,
    ),
}

_LEFT_OUT = frozenset(
    {
        "client_encoding",
        "fallback_application_name",
        "keepalives_count",
        "keepalives_idle",
        "keepalives_interval",
        "tcp_user_timeout",
        "txbox_watchdog_seconds",
    }
)
_WITH_A_CODE = ("java.sql.BatchUpdateException", "org.postgresql.util.PSQLException")


PARTITION_BYTES = 32 << 20
"""How many bytes of a table one task reads by default: about 300,000 rows of the inbox."""

MAX_PARTITIONS = 256

SAMPLED_BYTES = 8 << 20
"""How many bytes of a table are sampled to cut it evenly: about 80,000 rows of the inbox."""


def read_table(
    spark: SparkSession,
    database: URL,
    table: str,
    *,
    fetched: int,
    ranges: Sequence[str] = ("true",),
    options: Mapping[str, str] | None = None,
) -> DataFrame:
    """Return the rows of a table, or of a query in parentheses with a name.

    Args:
        spark: the Spark session.
        database: the database's URL.
        table: SQL without parameters, which Spark's JDBC source does not have.
        fetched: how many rows a task fetches at a time; by default, the JDBC driver fetches all of them at once.
        ranges: SQL conditions; a task reads the rows of each.
        options: more options of Spark's reader.
    """
    properties = {**jdbc_options(database), "fetchsize": str(fetched), **(options or {})}
    return spark.read.jdbc(properties.pop("url"), table, predicates=list(ranges), properties=properties)


def ranges_of(key: str, bounds: Iterable[str]) -> list[str]:
    """Return SQL conditions that cut a table at sorted literals of its key, without gaps or overlaps."""
    cuts = list(dict.fromkeys(bounds))
    if not cuts:
        return ["true"]
    between = [f"{key} >= {low} AND {key} < {high}" for low, high in pairwise(cuts)]
    return [f"{key} < {cuts[0]}", *between, f"{key} >= {cuts[-1]}"]


def parts_of(table_bytes: int) -> int:
    return min(max(-(-table_bytes // PARTITION_BYTES), 1), MAX_PARTITIONS)


def sampled_percent(table_bytes: int) -> float:
    return min(100.0, 100.0 * SAMPLED_BYTES / max(table_bytes, 1))


def literal(value: object) -> str:
    """Return a value as a Postgres literal, because Spark's JDBC source takes SQL as text, without parameters."""
    return Literal(value).as_string(None).strip()
