"""pyspark's functions and types, imported at their first use: without pyspark, the package says that it is missing."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["sql", "types"]


class _Module:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._name), name)


if TYPE_CHECKING:
    from pyspark.sql import functions as sql
    from pyspark.sql import types
else:
    sql, types = _Module("pyspark.sql.functions"), _Module("pyspark.sql.types")
