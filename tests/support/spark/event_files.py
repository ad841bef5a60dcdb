"""Files of events: what writes and reads them, what is in them, and folders that they are dropped into for a stream."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame

Write = Callable[..., str]
"""Write a file, compressed if its name says so, and return its path: write(name, text or bytes)."""
Read = Callable[..., DataFrame]
"""Write a file as ``Write`` does, and read its events: read(name, text or bytes, **what goes to read_events)."""


def rows(frame: DataFrame) -> list[tuple[Any, ...]]:
    """The rows of a frame."""
    return [tuple(row) for row in frame.collect()]


def drop(landing: Path, events: Iterable[Mapping[str, Any]]) -> None:
    """Put a file of JSON lines into a folder, whole at once, and younger than those that are there."""
    number = len(list(landing.iterdir()))
    hidden = landing / f"_{number:04}.json"
    hidden.write_text("".join(f"{json.dumps(event)}\n" for event in events), encoding="utf-8")
    # Spark takes the oldest file first, and files that are written one after another may be of one time.
    os.utime(hidden, (1_000_000_000 + number,) * 2)
    hidden.rename(landing / f"{number:04}.json")
