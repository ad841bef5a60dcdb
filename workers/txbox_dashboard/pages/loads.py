"""The page of bulk loads."""

import math
from collections.abc import Sequence
from typing import Any

from txbox.postgres.sql import with_moments
from txbox.postgres.sql_files import SqlFile
from txbox.status import find_blocked_loads
from txbox_dashboard.redaction import error_line
from txbox_dashboard.view import Page, Request

SHOWN = 20
CHUNKS = 5000
"""The most chunks in a map."""

STRETCHES = 60

LEFT_SECONDS = 60.0
"""A running load reports every few seconds. One that is silent for this long was left, or is stuck."""


class LoadPageStatements(SqlFile, file="loads.sql"):
    loads: str
    chunks: str


def loads(request: Request) -> Page:
    """Show the last bulk loads, and a map of one load's chunks."""
    reader = request.reader
    sql = LoadPageStatements.load(reader.schema, reader.prefix)
    found = [
        with_moments(row, "started_at", "finished_at")
        for row in reader.rows("the loads", sql.loads, {"limit": SHOWN}) or ()
    ]
    for load in found:
        load["state"] = _state(load)
        if load["error"]:
            load["error"] = error_line(request.settings, load["error"], "", load["subscriber_id"])
    wanted = request.query.get("run") or (found[0]["run_id"] if found else None)
    shown = next((load for load in found if load["run_id"] == wanted), None)
    chunks: list[dict[str, Any]] = []
    if shown is not None:
        asked = {"run_id": shown["run_id"], "limit": CHUNKS}
        chunks = [with_moments(row, "merged_at") for row in reader.rows("its chunks", sql.chunks, asked) or ()]
    times, applied = _pace(chunks)
    return Page(
        "loads.html",
        {
            "found": found,
            "shown": shown,
            "done": {one["chunk"]: one for one in chunks},
            "mapped": min(shown["chunks"], CHUNKS) if shown else 0,
            "times": times,
            "series": [("applied", applied)] if applied else [],
            "blocked": reader.read("who waits for whom", find_blocked_loads) or (),
        },
    )


def _state(load: dict[str, Any]) -> tuple[str, str]:
    """Return a load's state in words, and the kind of its badge."""
    if load["finished_at"] is not None:
        return "finished", "good"
    if load["error"]:
        return "failed", "bad"
    if load["idle_seconds"] > LEFT_SECONDS:
        return "silent", "bad"
    return "running", "warn"


def _pace(chunks: Sequence[dict[str, Any]]) -> tuple[list[float], list[int]]:
    """Return when each stretch of a load begins, in seconds since 1970, and how many events were applied in it."""
    merged = [(one["merged_at"].timestamp(), one["applied"]) for one in chunks if one["merged_at"] is not None]
    if not merged:
        return [], []
    first, last = min(at for at, _ in merged), max(at for at, _ in merged)
    seconds = max(math.ceil((last - first) / STRETCHES), 1)
    counts = [0] * (int((last - first) // seconds) + 1)
    for at, applied in merged:
        counts[int((at - first) // seconds)] += applied
    return [first + place * seconds for place in range(len(counts))], counts
