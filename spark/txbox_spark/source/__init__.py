"""Format txbox of Spark: DataFrames and streams written through the inbox, and tables of txbox read."""

from txbox.extras import needs

with needs("spark"):
    from txbox_spark.source.data_source import TxboxSource
    from txbox_spark.source.source_options import FORMAT

__all__ = ["FORMAT", "TxboxSource"]
