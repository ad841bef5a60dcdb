"""Tests of handlers: deliver a message, with a fault if you like, or try a handler with every fault at every point.

The pytest plugin is ``txbox_testing.plugin``. Everything else is imported only when a test uses it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from txbox_testing.delivery import Delivered, deliver
    from txbox_testing.faults import (
        PLACES,
        Fault,
        crash_at,
        delay,
        duplicate,
        lose_ack,
        lose_commit,
        lose_commit_answer,
        overtake,
    )
    from txbox_testing.load_run import load, try_every_point_of_load
    from txbox_testing.relay_run import RelayedMessages, relay
    from txbox_testing.stages.stage import NotSettled
    from txbox_testing.trial import NotIdempotent, PointResult, TrialReport, try_every_point

__all__ = [
    "PLACES",
    "Delivered",
    "Fault",
    "NotIdempotent",
    "NotSettled",
    "PointResult",
    "RelayedMessages",
    "TrialReport",
    "crash_at",
    "delay",
    "deliver",
    "duplicate",
    "load",
    "lose_ack",
    "lose_commit",
    "lose_commit_answer",
    "overtake",
    "relay",
    "try_every_point",
    "try_every_point_of_load",
]

_MODULES = {
    "faults": "PLACES Fault crash_at delay duplicate lose_ack lose_commit lose_commit_answer overtake",
    "delivery": "Delivered deliver",
    "load_run": "load try_every_point_of_load",
    "relay_run": "RelayedMessages relay",
    "stages.stage": "NotSettled",
    "trial": "NotIdempotent PointResult TrialReport try_every_point",
}


if not TYPE_CHECKING:  # otherwise type checkers would accept any name of this module

    def __getattr__(name: str) -> Any:
        for module, names in _MODULES.items():
            if name in names.split():
                return getattr(import_module(f"{__name__}.{module}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
