"""How many chunks one transaction merges: as many as it can without holding its locks for longer than it should.

Ids that a chunk has recorded, and rows that its effect has changed, are locked until its transaction ends; a worker
that meets one of them waits. How long depends on the effect, on the inbox and on the machine, so it is measured.
Chunks are small; a transaction takes one of them first, and then as many that follow each other as the time allows.
Larger transactions cost less: fewer commits, and an effect that adds up changes a row once, not once for each chunk.
"""

import threading

GROWTH = 4
"""A transaction takes at most so many times the chunks of the one before it."""


class MergeSizer:
    """Sizes the transactions of one task, or of the threads of one process."""

    def __init__(self, lock_seconds: float, most: int) -> None:
        """Begin with one chunk.

        Args:
            lock_seconds: how long a transaction may hold its locks, about.
            most: chunks that a transaction takes, whatever its time.
        """
        self._lock_seconds = lock_seconds
        self._most = most
        self._chunks = 1
        self._lock = threading.Lock()

    @property
    def chunks(self) -> int:
        """How many chunks the next transaction takes, at most."""
        return self._chunks

    def merged(self, chunks: int, held_seconds: float) -> None:
        """Take account of a transaction that has merged so many chunks and has held its locks for so long."""
        fit = chunks * self._lock_seconds / max(held_seconds, 1e-6)
        with self._lock:
            self._chunks = max(1, min(int(fit), self._most, GROWTH * chunks))
