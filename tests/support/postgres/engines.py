"""What engines of the tests are made with."""

from typing import Any, Final

NO_HSTORE: Final[dict[str, Any]] = {"use_native_hstore": False}
"""SQLAlchemy's first connection would look for a type that is not there: a third of what an engine costs a test."""
