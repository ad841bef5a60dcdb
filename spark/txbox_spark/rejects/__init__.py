"""Rows that are not loaded: why, how many for each cause, and where they are kept."""
