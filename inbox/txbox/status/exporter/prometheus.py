"""The database's figures as Prometheus metrics. Needs the extra ``prometheus``.

::

    registry = CollectorRegistry()
    registry.register(DatabaseCollector(engine))

The metrics of the runway have the same names as those of ``PrometheusHook``; use a registry without one.
"""

import math
import threading
import time
from collections.abc import Iterable

from sqlalchemy import Engine

from txbox.errors import InvalidConfiguration
from txbox.extras import needs
from txbox.status.exporter.figures import GAUGES, LIMIT_SECONDS, Figures, FiguresReader

with needs("prometheus"):
    from prometheus_client.core import GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector

__all__ = ["DatabaseCollector"]

INTERVAL_SECONDS = 15.0
"""The least time between two reads of the database."""

CHECK_SECONDS = 3.0
"""The least time between two checks whether the database answers, and the limit of each."""


class DatabaseCollector(Collector):
    """Reads the database when it is scraped, at most once per interval, and one read at a time."""

    def __init__(
        self,
        engine: Engine,
        *,
        schema: str | None = None,
        prefix: str = "",
        interval_seconds: float = INTERVAL_SECONDS,
        limit_seconds: float = LIMIT_SECONDS,
    ) -> None:
        """Store the database; it connects only at the first scrape.

        Args:
            engine: the database; uses one connection at a time, and one more in ``database_answers``.
            schema: the Postgres schema that holds the tables; None leaves it to the search path.
            prefix: what the tables' names start with.
            interval_seconds: how long a read is served before the next one.
            limit_seconds: of a whole read: less than Prometheus's ``scrape_timeout``. What is not read in time is left
                out.

        Raises:
            InvalidConfiguration: an argument cannot work.
        """
        if not 0 < interval_seconds <= 3_600:
            raise InvalidConfiguration(
                f"DatabaseCollector.interval_seconds must be more than 0 and at most 3600, not {interval_seconds!r}"
            )
        if not 1 <= limit_seconds <= 600:
            raise InvalidConfiguration(f"DatabaseCollector.limit_seconds must be from 1 to 600, not {limit_seconds!r}")
        self._reader = FiguresReader(engine, schema, prefix, limit_seconds)
        self._interval_seconds = interval_seconds
        self._reading = threading.Lock()
        self._read: Figures | None = None
        self._read_at = 0.0
        self._checking = threading.Lock()
        self._answers = False
        self._checked_at = -math.inf

    def describe(self) -> Iterable[Metric]:
        """Return the metrics without figures, and without reading the database."""
        return _families(Figures(False, (), {}), 0.0)

    def database_answers(self) -> bool:
        """Return whether the database answers, for a probe: asks at most every ``CHECK_SECONDS``, once at a time."""
        with self._checking:
            if time.monotonic() - self._checked_at >= CHECK_SECONDS:
                self._answers = self._reader.can_read(CHECK_SECONDS)
                self._checked_at = time.monotonic()
            return self._answers

    def collect(self) -> Iterable[Metric]:
        """Return the figures of the last read, or read again if it is too old."""
        with self._reading:
            if self._read is None or time.monotonic() - self._read_at >= self._interval_seconds:
                self._read = self._reader.read()
                self._read_at = time.monotonic()
            return _families(self._read, time.monotonic() - self._read_at)


def _families(read: Figures, age: float) -> list[Metric]:
    families = {
        name: GaugeMetricFamily(f"txbox_{name}", description, labels=labels)
        for name, (description, labels) in GAUGES.items()
    }
    for figure in read.figures:
        families[figure.metric].add_metric(figure.labels, figure.value)
    up = GaugeMetricFamily("txbox_exporter_up", "Whether the database could be read", value=float(read.up))
    since = GaugeMetricFamily("txbox_exporter_read_age_seconds", "How long ago it was read", value=age)
    success = GaugeMetricFamily("txbox_exporter_read_success", "Whether a part could be read", labels=["part"])
    exact = GaugeMetricFamily("txbox_exporter_exact", "Whether a part's figures are not lower bounds", labels=["part"])
    seconds = GaugeMetricFamily("txbox_exporter_read_seconds", "How long that took", labels=["part"])
    for name, part in read.parts.items():
        success.add_metric((name,), float(part.succeeded))
        exact.add_metric((name,), float(part.exact))
        seconds.add_metric((name,), part.seconds)
    return [up, since, success, exact, seconds, *families.values()]
