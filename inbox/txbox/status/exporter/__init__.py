"""The database's figures for monitoring systems; each exporter is an optional file."""
