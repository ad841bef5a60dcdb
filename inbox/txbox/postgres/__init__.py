"""What all use of Postgres: engines, transactions and their guards, SQLSTATEs, how SQL is put together."""
