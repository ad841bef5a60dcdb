"""What tests of a service that uses txbox need."""

from txbox.testing.crash_points import kill_at

__all__ = ["kill_at"]
