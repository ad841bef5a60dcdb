"""Process every message exactly once in effect, with nothing but Postgres."""

__version__ = "0.1.0"
