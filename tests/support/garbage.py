"""No garbage is looked for while tests are collected. A plugin of pytest.

Half a million objects of modules and tests stay until the end. To go through them again and again had a sixth of the
time of a collection, and each process of a run collects all tests.
"""

import gc
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let the collector of garbage rest."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
