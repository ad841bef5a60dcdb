"""Tests of workers: short pauses; and those of ``BOTH_KINDS`` are run over an ``AsyncWorker``, too."""

from collections.abc import Iterator

import pytest

from support.workers import coroutine_worker
from support.workers.kinds import BOTH_KINDS, KINDS_AND_LEVELS, THREADS_ONLY


@pytest.fixture(autouse=True)
def _short_pauses(short_pauses: None) -> None:
    """No test of workers waits longer than it has to."""


@pytest.hookimpl(tryfirst=True)  # marks are read after that
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Have a test of these modules be two: of a ``Worker``, and of an ``AsyncWorker``."""
    module = metafunc.module.__name__.partition("txbox_workers.")[2]
    if module not in BOTH_KINDS or metafunc.function.__name__ in THREADS_ONLY or "sqs" in metafunc.fixturenames:
        return
    if "leveled" in metafunc.fixturenames:
        mark = pytest.mark.parametrize(("_kind", "leveled"), KINDS_AND_LEVELS, indirect=True)
        metafunc.definition.add_marker(mark)  # a mark comes before the fixture's own parameters
    else:
        metafunc.parametrize("_kind", ["threads", "asyncio"], indirect=True)


@pytest.fixture(autouse=True)
def _kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Which worker the test has: one for functions, or one for coroutines in its place."""
    if getattr(request, "param", "threads") == "threads":
        yield
        return
    coroutine_worker.replace_workers(monkeypatch, request.module)
    yield
    coroutine_worker.dispose()
