"""Parses files so that nothing is dropped or changed: their encodings, and the records of CSV, JSON and Parquet."""
