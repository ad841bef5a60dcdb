"""Chunks of a load: their ranges of ids, their rows in Arrow, and the transactions that merge them into Postgres."""
