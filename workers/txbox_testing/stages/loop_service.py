"""A worker for coroutines on its own event loop: a gate that holds one coroutine holds the loop, as a death does."""

import asyncio
import copy
import threading
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine

from txbox_testing.stages.life import Life
from txbox_workers.coroutines import AsyncWorker
from txbox_workers.delivery import Source

T = TypeVar("T")

FINISH_SECONDS = 2.0
"""How long a report in progress may take after the worker has stopped."""

LOOK_SECONDS = 0.02
"""Between checks for a gate that holds the loop."""


class LoopService:
    """Runs an ``AsyncWorker`` in a thread. Implements ``Stoppable``.

    Args:
        engine: the database, for coroutines. Its pool is left alone.
        options: of ``AsyncWorker``, without the engine.
    """

    def __init__(self, source: Source, life: Life, engine: Engine, options: Mapping[str, Any]) -> None:
        self._life = life
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="txbox-testing-loop", daemon=True)
        self._engine = own_engine(engine)
        given = {**options, "engine": self._engine} if options["inbox"] is not None else options
        self._worker = AsyncWorker(source, **given)
        self.stopping = False

    def start(self) -> None:
        """Start, and return even if a gate holds the loop before the worker can report that it has started."""
        self._thread.start()
        started = asyncio.run_coroutine_threadsafe(self._worker.start(), self._loop)
        while not self._life.held:
            try:
                started.result(LOOK_SECONDS)
                return
            except TimeoutError:
                continue
            except BaseException:
                self._end()
                raise

    def stop(self, timeout: float) -> bool:
        """Finish what was begun, and end the loop. Return whether it finished in time."""
        self.stopping = True
        try:
            return self._call(self._worker.stop(timeout))
        finally:
            self._end()

    def _end(self) -> None:
        self._call(self._finish())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _finish(self) -> None:
        """Let what still runs, such as a report, end, and close the connections."""
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        if rest:
            await asyncio.wait(rest, timeout=FINISH_SECONDS)
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        await self._engine.dispose()

    def _call(self, call: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()


def own_engine(engine: Engine) -> AsyncEngine:
    """Return an engine with another one's options and events, and a pool of its own for one event loop."""
    mine = copy.copy(engine)
    mine.pool = engine.pool.recreate()
    return AsyncEngine(mine)
