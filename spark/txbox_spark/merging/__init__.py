"""One chunk of a load: its range of ids, its rows in Arrow, and the transaction that merges it into Postgres."""
