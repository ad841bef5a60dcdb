"""An ``AsyncWorker`` in the place of a ``Worker``: the tests of the one are those of the other.

Its event loop has a thread of its own. Handlers, and engines, are those that the tests give to a ``Worker``: a handler
runs with the sync session of the ``AsyncSession`` that the worker hands out.
"""

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import wraps
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from txbox import Outcome
from txbox.service import STOP_SECONDS
from txbox_workers.coroutines import AsyncWorker
from txbox_workers.delivery import Delivery, Settlement, Source


class CoroutineWorker:
    """Looks like a ``Worker``."""

    def __init__(self, source: Source, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        if "threads" in options:
            options["concurrency"] = options.pop("threads")
        self.engine: AsyncEngine | None = None
        if (engine := options.get("engine")) is not None:
            options["engine"] = self.engine = _async_engine(engine)
        options.pop("session_factory", None)
        for name in ("handler", "batch_handler"):
            if options.get(name) is not None:
                options[name] = _as_coroutine(options[name])
        options.setdefault("concurrency", 1)
        self._worker = AsyncWorker(source, **options)
        self._thread: threading.Thread | None = None
        _made.append(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    @property
    def counts(self) -> Mapping[Outcome, int]:
        return self._worker.counts

    @property
    def _processor(self) -> "_Processor":
        self._begin()
        return _Processor(self)

    def start(self) -> None:
        self._begin()
        self._run(self._worker.start())

    def stop(self, timeout: float = STOP_SECONDS) -> bool:
        self._begin()
        return bool(self._run(self._worker.stop(timeout)))

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
            self._thread.start()

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        running: Future[Any] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return running.result(120)

    def end(self) -> None:
        if self._thread is None:
            return
        if self.engine is not None:
            self._run(self.engine.dispose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


_made: list[CoroutineWorker] = []


def dispose() -> None:
    """Close the connections of all workers that a test has made, and end their loops."""
    while _made:
        _made.pop().end()


class _Processor:
    def __init__(self, worker: CoroutineWorker) -> None:
        self._worker = worker

    def process(self, deliveries: Sequence[Delivery]) -> Iterator[list[Settlement]]:
        worker = self._worker._worker
        worker._calls.bind(self._worker._loop)
        yield from worker._calls.call(lambda: list(worker._worker._processor.process(deliveries)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker._worker._worker._processor, name)


def _async_engine(engine: Engine) -> AsyncEngine:
    options = dict(engine.get_execution_options())
    return create_async_engine(engine.url, pool_size=20, **{k: v for k, v in options.items() if k == "isolation_level"})


def _as_coroutine(handler: Any) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(handler):
        return handler

    @wraps(handler)
    async def handle(*args: Any, **kwargs: Any) -> Any:
        if isinstance(args[0], AsyncSession):
            return await args[0].run_sync(handler, *args[1:], **kwargs)
        return handler(*args, **kwargs)

    return handle
