"""Rows that are not loaded: why, how many for the same cause, and where all of them are kept."""
