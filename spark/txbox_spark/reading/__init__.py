"""Reads events from Parquet, JSON lines, CSV and tables, so that nothing is dropped or changed."""
