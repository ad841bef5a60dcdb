"""The types of fields, and which values each accepts. The same rules hold for workers, for Lambda and for Spark.

A rule applies to a value's text: a string's characters, or anything else's JSON as written. So ``12`` and ``"12"`` are
the same bigint. Whatever a rule accepts, Postgres accepts too, under any setting. A rule is a range and a pattern that
Python and Java read alike. Postgres itself accepts more, because it guesses; we accept none of that.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation, localcontext

from txbox.errors import InvalidConfiguration

MAX_DIGITS = 1_000
"""How many characters a number may have; Spark reads no longer ones."""

MAX_PRECISION = 38
"""The most digits of ``numeric(precision, scale)``, as in Spark."""


@dataclass(frozen=True, slots=True)
class FieldType:
    """A type of fields.

    Attributes:
        name: the type in Postgres.
        pattern: matches a value's whole text, in a syntax that Python and Java read alike; None: any text.
        whole_numbers: the range of whole numbers, both ends included; None: not a whole-number type.
        precision, scale: of ``numeric``, where it has them.
        quoted: whether values are quoted within an array.
    """

    name: str
    pattern: str | None
    whole_numbers: tuple[int, int] | None = None
    precision: int | None = None
    scale: int = 0
    quoted: bool = False

    @property
    def kind(self) -> str:
        """The type without its precision."""
        return self.name.partition("(")[0]

    def checker(self) -> Callable[[str], bool]:
        """Return a function that tells whether the type accepts a text."""
        if self.pattern is None:
            return _CHECKS[self.kind]
        matches = re.compile(self.pattern, re.ASCII).fullmatch
        beyond = self._beyond_pattern()
        if beyond is None:
            return lambda text: matches(text) is not None
        return lambda text: matches(text) is not None and beyond(text)

    def _beyond_pattern(self) -> Callable[[str], bool] | None:
        if self.whole_numbers is not None:
            least, most = self.whole_numbers
            return lambda text: least <= int(text) <= most
        if self.precision is not None:
            return lambda text: _fits(text, self.precision or 0, self.scale)
        return _CHECKS.get(self.kind)


def field_type(written: str) -> FieldType:
    """Return the type of a name as Postgres has it, or as Spark has it where that is unambiguous.

    Raises:
        InvalidConfiguration: no field type has that name.
    """
    plain = " ".join(written.lower().split())
    if (found := _NUMERIC.fullmatch(plain)) is not None:
        precision, scale = int(found[1]), int(found[2] or 0)
        if not 1 <= precision <= MAX_PRECISION or scale > precision:
            raise InvalidConfiguration(
                f"{written}: a numeric has 1 to {MAX_PRECISION} digits, and at most as many after the point; or it is "
                "numeric without a precision"
            )
        return FieldType(f"numeric({precision},{scale})", NUMBER, precision=precision, scale=scale)
    if plain == "timestamp":
        raise InvalidConfiguration(
            "timestamp: Postgres and Spark mean different types by it; say timestamptz, or timestamp without time zone"
        )
    name = _SYNONYMS.get(plain, plain)
    if name not in _TYPES:
        raise InvalidConfiguration(
            f"{written!r} is not a type of fields; they are {', '.join(_TYPES)} and numeric(precision, scale). Take "
            "text, and cast it in the statements"
        )
    return _TYPES[name]


def _fits(text: str, precision: int, scale: int) -> bool:
    """Whether a number fits ``numeric(precision, scale)``, rounded as Postgres and Spark round it."""
    number = Decimal(text)
    if number.is_zero():
        return True
    if number.adjusted() >= precision - scale:
        return False
    with localcontext(prec=precision + 2):
        try:
            rounded = number.quantize(Decimal(1).scaleb(-scale), ROUND_HALF_UP)
        except InvalidOperation:
            return False
    return rounded.is_zero() or rounded.adjusted() < precision - scale


def _is_double(text: str) -> bool:
    """Whether a number neither exceeds the largest double nor rounds to 0; Postgres refuses both."""
    number = float(text)
    return abs(number) != float("inf") and (number != 0 or not _NOT_ZERO.search(text.lower().partition("e")[0]))


def _is_text(text: str) -> bool:
    return "\0" not in text and (text.isascii() or not _SURROGATE.search(text))


def _is_jsonb(text: str) -> bool:
    """Whether Postgres can keep a text as jsonb, and every reader gets the same: no name occurs twice."""
    try:
        _STRICT.decode(text)
    except (ValueError, RecursionError):
        return False
    return _is_text(text) and not _BAD_ESCAPES.search(text)


def _unique_names(pairs: list[tuple[str, object]]) -> None:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a name comes twice")


def refuse_constant(name: str) -> None:
    """Refuse NaN and Infinity, which are not JSON."""
    raise ValueError(f"{name} is not JSON")


def _is_day(text: str) -> bool:
    try:
        date.fromisoformat(text[:10])
    except ValueError:
        return False
    return True


NUMBER = r"[+-]?([0-9]{1,900}(\.[0-9]{0,90})?|\.[0-9]{1,90})([eE][+-]?[0-9]{1,3})?"
_WHOLE = "[+-]?[0-9]{1,19}"
_DAY = "(?!0000)[0-9]{4}-[0-9]{2}-[0-9]{2}"
_TIME = r"[ T]([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?"
_ZONE = "(Z|[+-](0[0-9]|1[0-5]):?[0-5][0-9])"
_HEX = "[0-9a-fA-F]"
_NOT_ZERO = re.compile("[1-9]")
_SURROGATE = re.compile("[\ud800-\udfff]")

_HIGH, _LOW = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
BAD_ESCAPES = rf"(?<!\\)(?:\\\\)*(?:\\u0000|{_HIGH}(?!{_LOW})|(?<!{_HIGH}){_LOW})"
"""Matches an escape in JSON that Postgres cannot keep: NUL, or half of a surrogate pair."""

_BAD_ESCAPES = re.compile(BAD_ESCAPES)
_STRICT = json.JSONDecoder(object_pairs_hook=_unique_names, parse_constant=refuse_constant)
_CHECKS: dict[str, Callable[[str], bool]] = {
    "text": _is_text,
    "jsonb": _is_jsonb,
    "double precision": _is_double,
    "date": _is_day,
    "timestamptz": _is_day,
    "timestamp without time zone": _is_day,
}

_TYPES = {
    one.name: one
    for one in (
        FieldType("text", None, quoted=True),
        FieldType("smallint", _WHOLE, (-(2**15), 2**15 - 1)),
        FieldType("integer", _WHOLE, (-(2**31), 2**31 - 1)),
        FieldType("bigint", _WHOLE, (-(2**63), 2**63 - 1)),
        FieldType("numeric", NUMBER),
        FieldType("double precision", NUMBER),
        FieldType("boolean", "true|false"),
        FieldType("date", _DAY),
        FieldType("timestamptz", _DAY + _TIME + _ZONE, quoted=True),
        FieldType("timestamp without time zone", _DAY + _TIME, quoted=True),
        FieldType("uuid", f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}|{_HEX}{{32}}"),
        FieldType("jsonb", None, quoted=True),
    )
}
_SYNONYMS = {
    "string": "text",
    "varchar": "text",
    "character varying": "text",
    "short": "smallint",
    "int2": "smallint",
    "int": "integer",
    "int4": "integer",
    "long": "bigint",
    "int8": "bigint",
    "decimal": "numeric",
    "double": "double precision",
    "float8": "double precision",
    "bool": "boolean",
    "timestamp with time zone": "timestamptz",
    "timestamp_ntz": "timestamp without time zone",
}
_NUMERIC = re.compile(r"(?:numeric|decimal) ?\( ?(\d{1,4}) ?(?:, ?(\d{1,4}) ?)?\)")
