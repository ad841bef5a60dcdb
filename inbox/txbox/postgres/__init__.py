"""What all use of Postgres shares: engines, transactions and their guards, SQLSTATEs, and how SQL is built."""
