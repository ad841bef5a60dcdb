"""A small project of Django's: its settings, its models, and what its workers run."""
