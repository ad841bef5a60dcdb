"""Tests of workers: short pauses; and many are run over an ``AsyncWorker`` and over a ``PostgresWorker``, too."""

from collections.abc import Iterator

import pytest

from support.workers import coroutine_worker, outbox_worker
from support.workers.kinds import BOTH_KINDS, KINDS_AND_LEVELS, NOT_OVER_OUTBOX, OVER_OUTBOX, THREADS_ONLY


@pytest.fixture(autouse=True)
def _short_pauses(short_pauses: None) -> None:
    """No test of workers waits longer than it has to."""


@pytest.hookimpl(tryfirst=True)  # marks are read after that
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Have a test of these modules be several: of each kind of worker that can have it."""
    module, name = metafunc.module.__name__.partition("txbox_workers.")[2], metafunc.function.__name__
    if "sqs" in metafunc.fixturenames:
        return
    kinds = ["threads"]
    if module in BOTH_KINDS and name not in THREADS_ONLY:
        kinds.append("asyncio")
    if module in OVER_OUTBOX and name not in NOT_OVER_OUTBOX:
        kinds.append("postgres")
    if len(kinds) == 1:
        return
    if "leveled" in metafunc.fixturenames:
        levels = [(kind, level) for kind, level in KINDS_AND_LEVELS if kind in kinds]
        mark = pytest.mark.parametrize(("_kind", "leveled"), levels, indirect=True)
        metafunc.definition.add_marker(mark)  # a mark comes before the fixture's own parameters
    else:
        metafunc.parametrize("_kind", kinds, indirect=True)


@pytest.fixture(autouse=True)
def _kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Which worker the test has: one for functions, or another kind in its place."""
    kind = getattr(request, "param", "threads")
    if kind == "asyncio":
        coroutine_worker.replace_workers(monkeypatch, request.module)
        yield kind
        coroutine_worker.dispose()
    elif kind == "postgres":
        has_schema = "schema_url" in request.fixturenames
        url = request.getfixturevalue("schema_url") if has_schema else None
        outbox_worker.replace_workers(monkeypatch, request.module, url)
        yield kind
        outbox_worker.dispose()
    else:
        yield kind
