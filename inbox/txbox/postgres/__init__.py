"""What the subpackages share of Postgres: engines, transactions and their guards, SQLSTATEs, how SQL is put together."""
