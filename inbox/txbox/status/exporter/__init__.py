"""Figures of the database for monitoring systems; each exporter is an optional file."""
