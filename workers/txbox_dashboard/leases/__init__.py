"""Leases: what is worked on, and what was left behind."""
