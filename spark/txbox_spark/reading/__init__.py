"""Events from files: Parquet, JSON lines and CSV, read so that nothing is dropped or changed."""
