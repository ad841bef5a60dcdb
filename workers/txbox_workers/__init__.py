"""Workers: they take messages from a source, and process each once through an inbox or a ledger."""
