"""The name by which version 0.1 knew ``txbox.backoff``."""

from txbox.backoff import Backoff

__all__ = ["Backoff"]
