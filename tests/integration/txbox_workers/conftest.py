import pytest


@pytest.fixture(autouse=True)
def _short_pauses(short_pauses: None) -> None:
    """No test of workers waits longer than it has to."""


@pytest.fixture(autouse=True)
def _asyncio(request, monkeypatch):
    import os

    if os.environ.get("KIND") == "asyncio":
        from support.workers import coroutine_worker, ledger_worker, memory_worker

        monkeypatch.setattr(memory_worker, "Worker", coroutine_worker.CoroutineWorker)
        monkeypatch.setattr(ledger_worker, "Worker", coroutine_worker.CoroutineWorker)
        if hasattr(request.module, "Worker"):
            monkeypatch.setattr(request.module, "Worker", coroutine_worker.CoroutineWorker)
    yield
    if os.environ.get("KIND") == "asyncio":
        coroutine_worker.dispose()
