"""Conformance suites: what every implementation of a port must do, as tests that yours inherits.

A suite is a class. Subclass it in a test file under a name that begins with ``Test``, and override its one fixture.
"""

import pytest

pytest.register_assert_rewrite(*(f"{__name__}.{suite}" for suite in ("source", "publisher", "ledger", "writer")))
