"""The ledger of bulk loads, as people look at it: which runs there are, how far they are, and which are forgotten."""

from txbox.loads.bulk_loads import SILENT_SECONDS, BulkLoad, BulkLoads, LoadCounts, LoadState

__all__ = ["SILENT_SECONDS", "BulkLoad", "BulkLoads", "LoadCounts", "LoadState"]
