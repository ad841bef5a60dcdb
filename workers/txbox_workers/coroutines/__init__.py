"""A worker whose handlers are coroutines: many of them run at once on one event loop.

::

    threads      receive (8) ── buffer ── dispatcher                      acks and hand-backs (8) ── heartbeat
                                              │ a batch, when one of `concurrency` tasks is free      ▲
    event loop                                └──▶ task: processor, in a greenlet ── outcome ─────────┘
                                                      └── await handler(session, message)

Everything but the handlers is shared with the worker for functions. Its processor runs in a greenlet and yields to the
loop while it waits for the database (``txbox.postgres.drivers.greenlets``). The broker's client is synchronous and has
threads of its own, so a handler that blocks the loop does not keep deliveries from being extended.
"""

from txbox_workers.coroutines.options import (
    DEFAULTS as DEFAULTS,
)
from txbox_workers.coroutines.options import (
    AsyncBatchHandler,
    AsyncHandler,
    AsyncProcessingOptions,
    AsyncWorkerOptions,
    for_functions,
)
from txbox_workers.coroutines.worker import AsyncWorker

__all__ = [
    "AsyncBatchHandler",
    "AsyncHandler",
    "AsyncProcessingOptions",
    "AsyncWorker",
    "AsyncWorkerOptions",
    "for_functions",
]
