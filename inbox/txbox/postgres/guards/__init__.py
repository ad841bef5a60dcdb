"""Guards: only txbox ends the transaction that a handler works in."""
