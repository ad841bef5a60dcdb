"""Writes Arrow's values as text that Postgres parses as the same value; ``columns`` does it with Spark's expressions.

A Python data source receives Arrow batches, and cannot use Spark's expressions. So array literals, and JSON of structs
and maps, are built here, a column at a time, with the same result as Spark's expressions.
"""

import base64
import json
from collections.abc import Callable
from decimal import Decimal

from txbox_spark.runtime.lazy_imports import DataType, compute, pyarrow, types


def literal(array: "pyarrow.Array", type_: DataType) -> "pyarrow.StringArray":
    """Return values of a Spark type as text that Postgres parses as the type's counterpart; a text stays as it is."""
    match type_:
        case types.StructType() | types.MapType() | types.VariantType():
            return as_json(array, type_)
        case types.ArrayType() if _holds_json(type_):
            return as_json(array, type_)
        case types.ArrayType():
            element = type_.elementType
            texts = literal(array.values, element)
            if not isinstance(element, types.ArrayType):
                texts = _joined('"', _escaped(texts), '"')
            return _lists(array, array.offsets, texts.fill_null("NULL"), "{", "}")
        case types.BinaryType():
            return _each(array, lambda value: "\\x" + value.hex())
        case types.FloatType() | types.DoubleType():
            return _spelled(array.cast(pyarrow.string()), r"^(-?\d+)$")
        case types.TimestampType():
            return _joined(_without_zeros(_clock(array)), "Z")
        case types.TimestampNTZType():
            return _without_zeros(_clock(array))
    return array.cast(pyarrow.string())


def as_json(array: "pyarrow.Array", type_: DataType) -> "pyarrow.StringArray":
    """Return values of a Spark type as JSON that keeps nulls and microseconds."""
    match type_:
        case types.StructType():
            parts: list[pyarrow.Array | str] = ["{"]
            for number, field in enumerate(type_.fields):
                values = as_json(array.field(number), field.dataType).fill_null("null")
                parts += ["," if number else "", json.dumps(field.name, ensure_ascii=False), ":", values]
            return _where(array.is_valid(), _joined(*parts, "}"), len(array))
        case types.ArrayType():
            texts = as_json(array.values, type_.elementType).fill_null("null")
            return _lists(array, array.offsets, texts, "[", "]")
        case types.MapType():
            keys = _quoted(literal(array.keys, type_.keyType))
            texts = _joined(keys, ":", as_json(array.items, type_.valueType).fill_null("null"))
            return _lists(array, array.offsets, texts, "{", "}")
        case types.VariantType():
            return _each(array, lambda one: _variant(types.VariantVal(one["value"], one["metadata"]).toPython()))
        case types.BinaryType():
            return _each(array, lambda value: f'"{base64.b64encode(value).decode()}"')
        case types.TimestampType():
            return _joined('"', compute.replace_substring(_clock(array), " ", "T"), 'Z"')
        case types.TimestampNTZType():
            return _joined('"', compute.replace_substring(_clock(array), " ", "T"), '"')
        case types.FloatType() | types.DoubleType():
            # Java writes a whole number of eight digits with an exponent, and as jsonb that has no fraction.
            words = _spelled(array.cast(pyarrow.string()), r"^(-?\d{1,7})$")
            strange = compute.match_substring_regex(words, "[Ny]").fill_null(False)
            return compute.if_else(strange, _joined('"', words, '"'), words)
        case types.BooleanType() | types.NumericType() | types.NullType():
            return array.cast(pyarrow.string())
    return _quoted(array.cast(pyarrow.string()))


def _holds_json(type_: DataType) -> bool:
    """Return whether the elements of an array become JSON, at any depth."""
    while isinstance(type_, types.ArrayType):
        type_ = type_.elementType
    return isinstance(type_, types.StructType | types.MapType | types.VariantType)


def _clock(array: "pyarrow.Array") -> "pyarrow.StringArray":
    """Return times as text without a zone; times with a zone are in UTC."""
    return array.cast(pyarrow.int64()).cast(pyarrow.timestamp(array.type.unit)).cast(pyarrow.string())


def _without_zeros(words: "pyarrow.StringArray") -> "pyarrow.StringArray":
    """Return times as Spark writes them, without trailing zeros in a fraction."""
    words = compute.replace_substring_regex(words, r"\.0+$", "")
    return compute.replace_substring_regex(words, r"(\.\d*[1-9])0+$", r"\1")


def _spelled(words: "pyarrow.StringArray", whole: str) -> "pyarrow.StringArray":
    """Return floating-point numbers as Java writes them; ``whole`` matches those that get a fraction."""
    words = compute.replace_substring_regex(words, whole, r"\1.0")
    return compute.replace_substring(compute.replace_substring(words, "nan", "NaN"), "inf", "Infinity")


def _variant(value: object) -> str:
    """Return a variant's value as JSON. Unlike Spark, pyspark's own function keeps trailing zeros of decimals."""
    match value:
        case dict():
            members = (f"{json.dumps(name, ensure_ascii=False)}:{_variant(one)}" for name, one in value.items())
            return f"{{{','.join(members)}}}"
        case list():
            return f"[{','.join(map(_variant, value))}]"
        case Decimal():
            return format(value.normalize(), "f")
        case bytes():
            return f'"{base64.b64encode(value).decode()}"'
        case None | bool() | int() | float() | str():
            return json.dumps(value, ensure_ascii=False)
    return json.dumps(str(value))


def _quoted(words: "pyarrow.StringArray") -> "pyarrow.StringArray":
    if compute.any(compute.match_substring_regex(words, r"[\x00-\x1f]")).as_py():
        return _each(words, lambda word: json.dumps(word, ensure_ascii=False))
    return _joined('"', _escaped(words), '"')


def _escaped(words: "pyarrow.StringArray") -> "pyarrow.StringArray":
    return compute.replace_substring(compute.replace_substring(words, "\\", "\\\\"), '"', '\\"')


def _joined(*parts: "pyarrow.StringArray | str") -> "pyarrow.StringArray":
    return compute.binary_join_element_wise(*parts, "")


def _lists(
    array: "pyarrow.Array", offsets: "pyarrow.Array", texts: "pyarrow.StringArray", begin: str, end: str
) -> "pyarrow.StringArray":
    """Return each list as the texts of its elements, separated by commas, between ``begin`` and ``end``."""
    joined = compute.binary_join(pyarrow.ListArray.from_arrays(offsets, texts), ",")
    return _where(array.is_valid(), _joined(begin, joined, end), len(array))


def _where(valid: "pyarrow.BooleanArray", words: "pyarrow.StringArray", length: int) -> "pyarrow.StringArray":
    # If all parts are scalars, as for a struct without fields, Arrow returns a scalar.
    if isinstance(words, pyarrow.Scalar):
        words = pyarrow.array([words.as_py()] * length, pyarrow.string())
    return compute.if_else(valid, words, pyarrow.scalar(None, pyarrow.string()))


def _each(array: "pyarrow.Array", text: "Callable[..., str]") -> "pyarrow.StringArray":
    return pyarrow.array([None if one is None else text(one) for one in array.to_pylist()], pyarrow.string())
