"""Leases: what is being processed, and what was left behind."""
