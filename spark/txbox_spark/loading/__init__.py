"""Runs a bulk load: the loader, its two writers (copy and jdbc), and the ledger."""
