"""The encodings of files: their names in Python and in Java, and what both read alike."""

import codecs
import re
from dataclasses import dataclass
from typing import Any

from txbox_spark.runtime.lazy_imports import Column, SparkSession, sql

REPLACED = "\ufffd"
"""What Java puts for bytes that are not in an encoding."""


class EncodingError(ValueError):
    """What is asked for cannot be had in this encoding; the message says why."""


@dataclass(frozen=True, slots=True)
class Charset:
    """An encoding."""

    name: str  # as Java calls it
    codec: str  # as Python calls it

    @property
    def is_utf8(self) -> bool:
        """Whether Spark can check the bytes as they are."""
        return self.name == "UTF-8"

    @property
    def is_wide(self) -> bool:
        """Whether a comma, or a line break, is more than one byte."""
        return self.name.startswith("UTF-16")

    @property
    def cause(self) -> tuple[str, str]:
        """Why a record that is not in it is malformed, and what to do."""
        return f"not {self.name}", REMEDY

    def decoded(self, data: Column) -> Column:
        """Return bytes as text. What is not UTF-8 stays as it is; in another encoding it becomes U+FFFD."""
        return data.cast("string") if self.is_utf8 else sql.decode(data, self.name)

    def refused(self, text: Column) -> Column:
        """Whether a text from ``decoded`` has something that is not in this encoding."""
        return ~sql.is_valid_utf8(text) if self.is_utf8 else sql.contains(text, sql.lit(REPLACED))

    def in_latin1(self, text: str) -> str:
        """Return a text as it looks where each of its bytes is read as one character."""
        try:
            return text.encode(self.codec).decode("latin-1")
        except UnicodeError as error:
            raise EncodingError(f"{text!r} cannot be written in {self.name}") from error


def charset_named(spark: SparkSession, name: str) -> Charset:
    """Find an encoding by Python's name for it, if Java has the same encoding.

    Raises ``EncodingError``: Python or Java does not have it, or Java reads it otherwise.
    """
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    jvm: Any = spark._jvm  # noqa: SLF001 pyspark has no other way to ask for its JVM
    try:
        codec = codecs.lookup(name).name.removesuffix("-sig")
        plain = _ASCII.encode(codec).decode("latin-1")  # not all that Python looks up is for text
        called = next(
            one
            for pattern, to in _IN_JAVA
            if jvm.java.nio.charset.Charset.isSupported(one := re.sub(pattern, to, codec))
        )
    except (LookupError, ValueError, StopIteration, Py4JJavaError, PySparkException) as error:
        raise EncodingError(f"encoding {name!r} is unknown; use one such as latin1, cp1252 or utf-16") from error
    charset = Charset(str(jvm.java.nio.charset.Charset.forName(called).name()), codec)
    if plain != _ASCII and not charset.is_wide and not charset.name.startswith("UTF-32"):
        # Line breaks, commas and braces are looked for as what they are in ASCII.
        raise EncodingError(f"in {charset.name}, ASCII has other bytes; convert the files to UTF-8 first")
    if charset.name.startswith("UTF-32"):
        # In it, Java takes a lone surrogate for a character, and then puts "?" for it.
        raise EncodingError(
            f"{charset.name} cannot be read so that nothing is changed; convert the files to UTF-8 first"
        )
    return charset


_ASCII = "".join(map(chr, range(128)))
_IN_JAVA = (
    # cp932 is Windows' to Python, and one of IBM's to Java, with other characters.
    (r"^cp(?=9\d\d$)", "windows-"),
    (r"^", ""),
    (r"-(?=[lb]e$)", ""),
    (r"^mac-", "x-mac"),
)
"""How to get from Python's name of an encoding to one that Java may know: what is replaced by what."""
REMEDY = "in another encoding? name it: encoding, --encoding"

EVERY_CHARSET = {"spark.sql.legacy.javaCharsets": "true", "spark.sql.legacy.codingErrorAction": "true"}
"""Settings by which Spark's ``decode`` takes every charset of Java's, and replaces what is not in it."""
