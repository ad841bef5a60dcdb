"""A worker for coroutines, on an event loop of its own: the gate that holds one holds the loop, as a death does."""

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
"""How long a report that is under way may take to end, after the worker has stopped."""

LOOK_SECONDS = 0.02
"""Between looks at whether a gate holds the loop."""


class LoopService:
    """Runs an ``AsyncWorker`` in a thread. Implements ``Stoppable``.

    Args:
        source: of the worker.
        life: of the worker.
        engine: the database, for coroutines; its pool is left alone.
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
        """Begin, and return, also if a gate holds the loop before the worker can say that it has begun."""
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
        """Finish what was begun, and end the loop; return whether it was finished in time."""
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
        """Let what still runs end, such as a report, and close the connections."""
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
    """Return an engine with the options and the events of another one, and a pool of its own: one event loop's."""
    mine = copy.copy(engine)
    mine.pool = engine.pool.recreate()
    return AsyncEngine(mine)
