"""The soak: everything at work at once, with faults of every kind, and an audit that asks nothing of txbox's own."""
