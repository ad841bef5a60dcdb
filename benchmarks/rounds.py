"""Measuring in alternation: A B C, A B C, … so that a machine that slows down slows every side down."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Figures", "Measurement", "Sample", "Spread", "alternate"]


@dataclass(frozen=True)
class Sample:
    """One measured value, and what else was seen beside it."""

    value: float
    details: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Measurement:
    """Something that can be measured again and again.

    Attributes:
        key: names it; ratios refer to it.
        unit: of its values.
        run: measures once.
    """

    key: str
    unit: str
    run: Callable[[], Sample]


@dataclass(frozen=True)
class Spread:
    """The median of some values, the lowest and the highest."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Describe values."""
        return cls(statistics.median(values), min(values), max(values))


class Figures:
    """What was measured: for each key, one sample for each round."""

    def __init__(self) -> None:
        self.units: dict[str, str] = {}
        self.samples: dict[str, list[Sample]] = {}

    def add(self, measurement: Measurement, sample: Sample) -> None:
        """Take one more sample."""
        self.units[measurement.key] = measurement.unit
        self.samples.setdefault(measurement.key, []).append(sample)

    def __contains__(self, key: str) -> bool:
        return key in self.samples

    def spread(self, key: str) -> Spread:
        """Describe what was measured under a key."""
        return Spread.of([sample.value for sample in self.samples[key]])

    def ratio(self, key: str, to: str) -> Spread | None:
        """Describe the ratio of two measurements, round by round; None where one of them was left out."""
        if key not in self or to not in self:
            return None
        pairs = zip(self.samples[key], self.samples[to], strict=False)
        return Spread.of([one.value / other.value for one, other in pairs])


def alternate(
    measurements: Sequence[Measurement], rounds: int, told: Callable[[int, Measurement, Sample], None]
) -> Figures:
    """Run all measurements, as many times as there are rounds.

    Args:
        measurements: in the order of each round.
        rounds: how many.
        told: is told of each sample: the round from 1, the measurement, the sample.
    """
    figures = Figures()
    for number in range(1, rounds + 1):
        for measurement in measurements:
            sample = measurement.run()
            figures.add(measurement, sample)
            told(number, measurement, sample)
    return figures
