"""A bulk load at work: chunks, the two writers, the merge and the ledger of what is done."""
