"""Fields: the columns of ``fresh_event``, and where in a message each column's value is.

In Python they are a mapping, on the command line one text. These two are the same::

    {"customer_id": "text at /customer/id not null", "cents": "bigint", "currency": Field("text", default="EUR")}
    customer_id text at /customer/id not null, cents bigint, currency text default 'EUR'

A JSON Pointer (RFC 6901) of object members only locates a value; without one, it is the member of the field's name.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from txbox.effects.field_types import FieldType, field_type
from txbox.errors import InvalidConfiguration

MAX_NAME_BYTES = 63
"""How much of a name Postgres keeps."""


@dataclass(frozen=True, slots=True)
class Field:
    """One column of ``fresh_event``.

    Attributes:
        type: text, smallint, integer, bigint, numeric, numeric(precision, scale), double precision, boolean, date,
            timestamptz, timestamp without time zone, uuid or jsonb.
        at: the JSON Pointer to its value, such as ``/customer/id``; None: the member of the field's name.
        default: the value where the message has none, or null; None: null.
        required: refuse a message that has no value, or null.

    Raises:
        InvalidConfiguration: when made, if something cannot work.
    """

    type: str
    at: str | None = None
    default: str | None = None
    required: bool = False
    of: FieldType = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "of", field_type(self.type))
        if self.at is not None and (not self.at.startswith("/") or _BAD_TILDE.search(self.at)):
            raise InvalidConfiguration(f"a field's place is a JSON Pointer, such as /customer/id, not {self.at!r}")
        if self.default is not None and not (isinstance(self.default, str) and self.of.checker()(self.default)):
            raise InvalidConfiguration(
                f"a field's default is text that its type takes: {self.default!r} is no {self.type}"
            )
        if self.required and self.default is not None:
            raise InvalidConfiguration("a field is required, or has a default, and not both")

    def path(self, name: str) -> tuple[str, ...]:
        """Return the names of the members that lead to the value."""
        if self.at is None:
            return (name,)
        return tuple(part.replace("~1", "/").replace("~0", "~") for part in self.at.split("/")[1:])


def read_fields(fields: Mapping[str, Field | str] | str) -> dict[str, Field]:
    """Return the fields by name, however they are written.

    Raises:
        InvalidConfiguration: they cannot be read, or Postgres cannot have columns of these names.
    """
    given = _read_text(fields) if isinstance(fields, str) else dict(fields)
    read: dict[str, Field] = {}
    for name, one in given.items():
        _require_name(name)
        try:
            read[name] = one if isinstance(one, Field) else _read_definition(one)
        except InvalidConfiguration as error:
            raise InvalidConfiguration(f"field {name}: {error}") from error
    return read


def _require_name(name: str) -> None:
    if not isinstance(name, str) or not 0 < len(name.encode()) <= MAX_NAME_BYTES or "\0" in name:
        raise InvalidConfiguration(f"field {name!r}: Postgres takes names of 1 to {MAX_NAME_BYTES} bytes")
    if name == "message_id":
        raise InvalidConfiguration("field message_id: fresh_event has it by itself; leave it out")
    if name in _SYSTEM_COLUMNS:
        raise InvalidConfiguration(f"field {name}: Postgres has its own column of that name; choose another one")


def _read_text(text: str) -> dict[str, str]:
    """Split a text at its commas into names, each with its definition."""
    found: dict[str, str] = {}
    for part in _PART.findall(text):
        if not part.strip():
            raise InvalidConfiguration(f"the fields have an empty place between two commas: {text!r}")
        match = _NAMED.fullmatch(part.strip())
        if match is None:
            raise InvalidConfiguration(f"{part.strip()!r} is not a name with a type, such as: customer_id text")
        name = match[1].replace('""', '"') if match[1] is not None else match[2]
        if name in found:
            raise InvalidConfiguration(f"field {name} comes twice")
        found[name] = match[3]
    if not found:
        raise InvalidConfiguration("there are no fields; they look like: customer_id text, cents bigint")
    return found


def _read_definition(text: str) -> Field:
    if not isinstance(text, str):
        raise InvalidConfiguration(f"its definition is a text or a Field, not {text!r}")
    match = _DEFINITION.fullmatch(text.strip())
    if match is None:
        raise InvalidConfiguration(
            f"{text!r} cannot be read; a definition is: type [at /pointer] [not null] [default 'value']"
        )
    default = match["quoted"].replace("''", "'") if match["quoted"] is not None else match["plain"]
    return Field(match["type"], match["at"], default, bool(match["required"]))


_BAD_TILDE = re.compile("~(?![01])")
_SYSTEM_COLUMNS = ("tableoid", "xmin", "cmin", "xmax", "cmax", "ctid")
_PART = re.compile(r"""((?:[^,'"(]|'(?:[^']|'')*'|"(?:[^"]|"")*"|\([^)]*\))+|(?<=,)(?=,|$)|^(?=,))""")
_NAMED = re.compile(r"""(?:"((?:[^"]|"")+)"|([^\s"'(),]+))\s+(.*)""", re.DOTALL)
_DEFINITION = re.compile(
    r"""(?P<type>[a-z_]\w*(?:\s+(?!at\b|not\b|default\b)[a-z]\w*)*\s*(?:\([^)]*\))?)
    (?:\s+at\s+(?P<at>/\S*))?
    (?P<required>\s+not\s+null)?
    (?:\s+default\s+(?:'(?P<quoted>(?:[^']|'')*)'|(?P<plain>[^\s']+)))?""",
    re.IGNORECASE | re.VERBOSE,
)
