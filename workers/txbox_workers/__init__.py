"""Workers take messages from a source and process each of them once, through an inbox or a ledger."""
