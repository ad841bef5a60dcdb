"""Counts the awaits of batches, and does something at one of them."""

from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import Any

import pytest

from txbox.postgres.drivers.greenlets import run_in_greenlet
from txbox_workers.coroutines import batch_tasks


class Awaits:
    """Calls ``then`` when a batch waits for something for the ``number``-th time; ``seen`` are the waits so far."""

    def __init__(self, patch: pytest.MonkeyPatch, number: int, then: Callable[[], object]) -> None:
        self.seen = 0
        self._number = number
        self._then = then

        async def counted(work: Callable[[], Any]) -> Any:
            if "BatchTasks" not in work.__qualname__:  # a check, or a report
                return await run_in_greenlet(work)
            return await _Counted(run_in_greenlet(work), self._note)

        patch.setattr(batch_tasks, "run_in_greenlet", counted)

    def _note(self) -> None:
        self.seen += 1
        if self.seen == self._number:
            self._then()


class _Counted:
    def __init__(self, awaitable: Awaitable[Any], note: Callable[[], object]) -> None:
        self._awaitable = awaitable
        self._note = note

    def __await__(self) -> Generator[Any, Any, Any]:
        inner: Any = self._awaitable.__await__()
        step: Callable[[], Any] = partial(inner.send, None)
        while True:
            try:
                waits_for = step()
            except StopIteration as end:
                return end.value
            self._note()
            try:
                step = partial(inner.send, (yield waits_for))
            except BaseException as error:  # noqa: BLE001 - it is thrown into what waits
                step = partial(inner.throw, error)
