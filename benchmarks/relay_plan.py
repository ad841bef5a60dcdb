"""What one round of the relay's benchmark measures, in which order: sides that are compared follow each other."""

from collections.abc import Callable, Mapping

from relay_measurements import Bench
from rounds import Measurement, Sample

__all__ = ["CONNECTIONS", "plan"]

CONNECTIONS = (1, 4, 16)


def plan(bench: Bench) -> list[Measurement]:
    """Everything that one round measures."""
    sizes, measurements = bench.sizes, []
    for count in CONNECTIONS:
        measurements += [
            bench.by_pgbench(f"publish pgbench business only, {count}c", count, publish=False),
            bench.by_pgbench(f"publish pgbench, {count}c", count, publish=True),
            bench.by_pgbench(f"publish pgbench into a plain table, {count}c", count, publish=True, plain=True),
            bench.by_pgbench(f"publish pgbench with NOTIFY, {count}c", count, publish=True, notify=True),
        ]
    measurements += [
        bench.by_pgbench("publish pgbench order only, 16c", 16, publish=False, order=True),
        bench.by_pgbench("publish pgbench order, 16c", 16, publish=True, order=True),
    ]
    measurements += [
        bench.by_python("publish Python business only, 16c", publish=False),
        bench.by_python("publish Python without bell, 16c", publish=True, ring=False),
        bench.by_python("publish Python, 16c", publish=True),
    ]
    for count in (1, 2, 4):
        measurements += [
            bench.drained_raw(f"drain by plain deletes x{count}", count),
            bench.drained(f"drain relay x{count}", count),
        ]
    measurements += [
        bench.drained("drain relay keyed x1", 1, keyed=True),
        bench.sent_bare("sqs boto3 alone"),
        bench.sent_by_relay("sqs relay"),
        bench.paced_alone("latency at 1,000/s, producers without relay or bell"),
        *_paced(bench, "latency at 1,000/s by plain deletes", "bare"),
        *_paced(bench, "latency at 1,000/s", "timed"),
        *_together("latency out of idleness", bench.woken, {"median": "ms", "most": "ms"}),
        bench.hurried("bell off, no relay", ring=False, relay=None),
        bench.hurried("bell on, a listener", ring=True, relay="idle"),
        bench.hurried("bell on, a relay at work", ring=True, relay="busy"),
        *_together("idle", bench.idle, {"transactions": "/s", "processor": "ms/s"}, between=" "),
    ]
    health = {"first windows": "/s", "last windows": "/s", "slowdown": "x", "table": "MiB", "indexes": "MiB"}
    for key, count, snapshot in (
        ("health snapshot", sizes.snapshot_messages, True),
        ("health", sizes.messages, False),
    ):

        def run(key: str = key, count: int = count, snapshot: bool = snapshot) -> Mapping[str, float]:
            return bench.endless(key, count, snapshot=snapshot)

        measurements += _together(key, run, health)
    measurements += _together(
        "memory", bench.remembered, {"at first": "MiB", "peak": "MiB", "at the end": "MiB"}, between=" "
    )
    return measurements


def _paced(bench: Bench, key: str, publisher: str) -> list[Measurement]:
    units = {"producers": "/s", "median": "ms", "p99": "ms", "most": "ms"}
    return _together(key, lambda: bench.paced(key, publisher), units)


def _together(
    key: str, run: Callable[[], Mapping[str, float]], units: Mapping[str, str], *, between: str = ", "
) -> list[Measurement]:
    """Return measurements that are made in one run: the first of them in a round makes it for all.

    Args:
        key: begins their keys.
        run: makes it; what has no unit goes with each of them as a detail.
        units: by what a measurement is.
        between: the key and that.
    """
    left: dict[str, float] = {}

    def part(name: str) -> Callable[[], Sample]:
        def measure() -> Sample:
            if name not in left:
                left.clear()
                left.update(run())
            return Sample(left.pop(name), {other: value for other, value in left.items() if other not in units})

        return measure

    return [Measurement(f"{key}{between}{name}", unit, part(name)) for name, unit in units.items()]
