"""Lets Spark find format txbox: it looks for ``DefaultSource`` in packages named ``pyspark_…``.

If Spark does not find it, call ``spark.dataSource.register(DefaultSource)``.
"""

from txbox_spark.source import TxboxSource as DefaultSource

__all__ = ["DefaultSource"]
