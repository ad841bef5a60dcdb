"""How much waits in queues, as Prometheus metrics. Needs the extra ``prometheus``, and ``aws`` for SQS.

SQS says about how many messages it holds. It does not say how old the oldest one is: that is a metric of CloudWatch,
which costs money and is minutes late. Workers report the age of what they receive.
"""

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, wait

from txbox.extras import needs
from txbox.text import text_of
from txbox_workers.brokers import DatabasePlace, Queue, broker_of

with needs("prometheus"):
    from prometheus_client.core import GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector

Backlog = Mapping[str, int]

GAUGES = {
    "queue_messages": ("Messages of a queue, about: waiting, delivered, delayed", ("source", "state")),
    "queue_up": ("Whether the queue has said how much it holds", ("source",)),
}
"""Each gauge's description and labels."""


class QueueCollector(Collector):
    """Asks all queues at the same time when it is scraped, at most once an interval."""

    def __init__(
        self, queue_urls: Sequence[str], place: DatabasePlace, *, interval_seconds: float, limit_seconds: float
    ) -> None:
        """Remember the queues. None is asked before the first scrape.

        Args:
            queue_urls: each queue's URL or other name, once.
            place: the database, for queues that are in it.
            interval_seconds: how long an answer is reused.
            limit_seconds: how long a whole read may take. A queue that has not answered by then is left out.
        """
        self._queue_urls, self._place = queue_urls, place
        self._interval_seconds = interval_seconds
        self._limit_seconds = limit_seconds
        self._reading = threading.Lock()
        self._read_at = 0.0
        self._backlogs: dict[str, Backlog] | None = None
        self._pending: dict[str, Future[Backlog]] = {}
        self._failed: dict[str, str] = {}
        self._queues: dict[str, Queue] = {}

    def describe(self) -> Iterable[Metric]:
        """Return the metrics without values. No queue is asked."""
        return _families((), {})

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of the last read, or read again if the interval has passed."""
        with self._reading:
            if self._backlogs is None or time.monotonic() - self._read_at >= self._interval_seconds:
                self._backlogs = self._read()
                self._read_at = time.monotonic()
            return _families(self._queue_urls, self._backlogs)

    def _read(self) -> dict[str, Backlog]:
        for url in self._queue_urls:
            if url not in self._pending:  # one that has not answered yet is not asked twice
                answer: Future[Backlog] = Future()
                self._pending[url] = answer
                # Not from a pool: at exit, Python waits for a pool's threads.
                threading.Thread(target=self._ask, args=(url, answer), name="txbox-queue", daemon=True).start()
        done = wait(self._pending.values(), self._limit_seconds).done
        found = {}
        for url, asked in list(self._pending.items()):
            if asked not in done:
                self._note(url, "no answer in time")
                continue
            del self._pending[url]
            if (error := asked.exception()) is None:
                found[url] = asked.result()
                self._failed.pop(url, None)
            else:
                self._note(url, text_of(error))
        return found

    def _ask(self, url: str, answer: Future[Backlog]) -> None:
        try:
            if url not in self._queues:
                self._queues[url] = broker_of(url).queue(url, self._place)
            answer.set_result(self._queues[url].backlog())
        except BaseException as error:  # noqa: BLE001 - the scrape is told
            answer.set_exception(error)

    def _note(self, url: str, why: str) -> None:
        """Log why a queue is left out, unless that was logged last time."""
        if self._failed.get(url) != why:
            self._failed[url] = why
            _log.warning("what waits in %s is not known: %s", url, why)


def _families(queue_urls: Sequence[str], backlogs: Mapping[str, Backlog]) -> list[Metric]:
    families = {
        name: GaugeMetricFamily(f"txbox_{name}", description, labels=labels)
        for name, (description, labels) in GAUGES.items()
    }
    for url in queue_urls:
        families["queue_up"].add_metric((url,), float(url in backlogs))
        for state, count in backlogs.get(url, {}).items():
            families["queue_messages"].add_metric((url, state), count)
    return list(families.values())


_log = logging.getLogger("txbox.status")
