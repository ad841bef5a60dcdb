"""Spark's format txbox: writes DataFrames and streams through the inbox, and reads txbox's tables."""

from txbox.extras import needs

with needs("spark"):
    from txbox_spark.source.data_source import TxboxSource
    from txbox_spark.source.source_options import FORMAT

__all__ = ["FORMAT", "TxboxSource"]
