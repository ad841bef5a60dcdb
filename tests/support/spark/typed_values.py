"""Values of every type, as Spark's SQL and as Postgres write them, with what most easily gets lost on the way."""

from collections.abc import Iterable
from dataclasses import dataclass

TEXTS = (
    "", " ", "it's", 'say "hi"', '"', '""', "a,b", ",", "new\nline", "\n", "carriage\rreturn", "\r\n", "tab\t",
    "\\", "\\\\", "\\N", "\\.", "a\n\\.\nb", "\\\n", "null", "NULL", "100 %", "%s", "$1", "{}", "{a,b}",
    "naïve Ωμέγα 🎉", "\u200b", "\ufeff", r"\u0000", r"\x00", "\x01\x1f\x7f",
)  # fmt: skip


@dataclass(frozen=True)
class Typed:
    """A column: its type in Spark and in Postgres, and values in the one's SQL and as the other reads them."""

    name: str
    spark: str
    postgres: str
    values: tuple[tuple[str, str], ...]


def _same(form: str, *values: str) -> Iterable[tuple[str, str]]:
    return tuple((form.format(one), one) for one in values)


_ALL_BYTES = bytes(range(256)).hex()
_NINES = "9" * 38
_ONES = "0." + "1" * 38

TYPED = (
    Typed("a_byte", "tinyint", "smallint", _same("CAST({} AS tinyint)", "-128", "127")),
    Typed("a_short", "smallint", "smallint", _same("CAST({} AS smallint)", "-32768", "32767")),
    Typed("an_int", "int", "integer", _same("{}", "-2147483648", "2147483647")),
    Typed("a_long", "bigint", "bigint", _same("{}L", "-9223372036854775808", "9223372036854775807")),
    Typed(
        "a_float",
        "float",
        "real",
        _same("CAST('{}' AS float)", "NaN", "Infinity", "-Infinity", "1e-45", "3.4028235e38", "0.1", "-0.0"),
    ),
    Typed(
        "a_double",
        "double",
        "double precision",
        _same(
            "CAST('{}' AS double)",
            "NaN", "Infinity", "-Infinity", "1e-300", "5e-324", "1.7976931348623157e308", "0.1", "-0.0", "0.12345678",
        ),
    ),
    Typed("whole", "decimal(38,0)", "numeric(38,0)", _same("{}BD", _NINES, f"-{_NINES}")),
    Typed("digits", "decimal(38,38)", "numeric(38,38)", _same("CAST('{}' AS decimal(38,38))", _ONES, "0")),
    Typed("money", "decimal(12,2)", "numeric(12,2)", _same("CAST('{}' AS decimal(12,2))", "0.10", "-1234567890.12")),
    Typed("a_boolean", "boolean", "boolean", _same("{}", "true", "false")),
    Typed(
        "a_date",
        "date",
        "date",
        _same(
            "DATE'{}'",
            "0001-01-01", "1582-10-10", "1582-10-15", "1900-02-28", "1970-01-01", "2011-12-30", "9999-12-31",
        ),
    ),
    Typed(
        "a_moment",
        "timestamp",
        "timestamp with time zone",
        _same(
            "TIMESTAMP'{}'",
            "0001-01-01 00:00:00Z", "0001-01-01 23:59:59.999999Z", "1582-10-10 12:00:00Z", "1883-11-18 12:03:57.5Z",
            "1969-12-31 23:59:59.999999Z", "2026-03-29 02:30:00.000001+02:00", "2026-10-25 00:30:00Z",
            "2026-11-01 05:30:00Z", "2026-11-01 06:30:00Z", "9999-12-31 23:59:59.999999Z",
        ),
    ),
    Typed(
        "a_clock",
        "timestamp_ntz",
        "timestamp without time zone",
        _same(
            "TIMESTAMP_NTZ'{}'",
            "0001-01-01 00:00:00", "1582-10-10 12:00:00", "1883-11-18 12:03:58", "2026-03-08 02:30:00.123456",
            "2011-12-30 10:00:00", "9999-12-31 23:59:59.999999",
        ),
    ),
    Typed("bytes", "binary", "bytea", ((f"X'{_ALL_BYTES}'", f"\\x{_ALL_BYTES}"), ("X''", "\\x"))),
    Typed("numbers", "array<int>", "integer[]", (("array(1, NULL, -3)", "{1,NULL,-3}"), ("array()", "{}"))),
    Typed("grid", "array<array<int>>", "integer[]", (("array(array(1, 2), array(NULL, 4))", "{{1,2},{NULL,4}}"),)),
    Typed(
        "moments",
        "array<timestamp>",
        "timestamp with time zone[]",
        (
            ("array(TIMESTAMP'0001-01-01 00:00:00Z', TIMESTAMP'1883-11-18 12:03:57.5Z')",
             "{0001-01-01 00:00:00Z,1883-11-18 12:03:57.5Z}"),
            ("array(TIMESTAMP'2026-11-01 05:30:00.000001Z', TIMESTAMP'2026-11-01 06:30:00.000001Z', NULL)",
             "{2026-11-01 05:30:00.000001Z,2026-11-01 06:30:00.000001Z,NULL}"),
        ),
    ),
    Typed(
        "clocks",
        "array<timestamp_ntz>",
        "timestamp without time zone[]",
        (("array(TIMESTAMP_NTZ'2026-03-08 02:30:00.5')", '{"2026-03-08 02:30:00.5"}'),),
    ),
    Typed(
        "dates", "array<date>", "date[]", (("array(DATE'0001-01-01', DATE'9999-12-31')", "{0001-01-01,9999-12-31}"),)
    ),
    Typed(
        "amounts",
        "array<decimal(38,18)>",
        "numeric(38,18)[]",
        (("array(1E-18BD, 12345678901234567890BD)", "{1e-18,12345678901234567890}"),),
    ),
    Typed(
        "floats",
        "array<double>",
        "double precision[]",
        (("array(CAST('NaN' AS double), CAST('-Infinity' AS double), 1e-300D, NULL)", "{NaN,-Infinity,1e-300,NULL}"),),
    ),
    Typed("flags", "array<boolean>", "boolean[]", (("array(true, false, NULL)", "{t,f,NULL}"),)),
    Typed("small", "array<tinyint>", "smallint[]", (("array(-128Y, 127Y)", "{-128,127}"),)),
    Typed("blobs", "array<binary>", "bytea[]", (("array(X'00ff5c22', X'', NULL)", r'{"\\x00ff5c22","\\x",NULL}'),)),
    Typed(
        "a_struct",
        "struct<a: int, t: timestamp, n: timestamp_ntz, d: decimal(38,18)>",
        "jsonb",
        (
            ("named_struct('a', NULL, 't', TIMESTAMP'2026-11-01 05:30:00.123456Z', 'n', NULL, 'd', 1E-18BD)",
             '{"a": null, "t": "2026-11-01T05:30:00.123456Z", "n": null, "d": 0.000000000000000001}'),
            ("named_struct('a', 1, 't', NULL, 'n', TIMESTAMP_NTZ'2026-03-08 02:30:00.123456', 'd', NULL)",
             '{"a": 1, "t": null, "n": "2026-03-08T02:30:00.123456", "d": null}'),
        ),
    ),
    Typed("a_map", "map<string, int>", "jsonb", (("map('k', 1, 'n', NULL)", '{"k": 1, "n": null}'), ("map()", "{}"))),
    Typed(
        "structs",
        "array<struct<a: int>>",
        "jsonb",
        (("array(named_struct('a', 1), NULL, named_struct('a', NULL))", '[{"a": 1}, null, {"a": null}]'),),
    ),
    Typed(
        "a_variant",
        "variant",
        "jsonb",
        (("parse_json('{\"a\": [1, null, 1.5]}')", '{"a": [1, null, 1.5]}'), ("parse_json('null')", "null")),
    ),
)  # fmt: skip
