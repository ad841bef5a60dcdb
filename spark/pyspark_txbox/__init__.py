"""The door by which Spark finds format txbox: it looks for ``DefaultSource`` in packages named ``pyspark_…``.

Where it does not look, ``spark.dataSource.register(DefaultSource)``.
"""

from txbox_spark.source import TxboxSource as DefaultSource

__all__ = ["DefaultSource"]
