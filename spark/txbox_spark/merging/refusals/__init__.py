"""What Postgres refuses of a chunk: values by COPY, and events by the effect. Their rows are found, and rejected."""
