"""The view: what a page function returns, and how that becomes HTML.

A page function reads, and returns a template with its values. The template extends ``layout.html``. A request from
htmx gets only the template's block ``live``, which replaces the one that is shown: so pages are live. Jinja escapes
everything that comes from the database.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.datastructures import QueryParams

from txbox import __version__
from txbox_dashboard.letter_runner import LetterRunner
from txbox_dashboard.reader import Reader
from txbox_dashboard.settings import DashboardSettings


@dataclass(frozen=True, slots=True)
class Page:
    """A template, its values, and the status of the response."""

    template: str
    values: Mapping[str, Any] = field(default_factory=dict)
    status: int = 200


@dataclass(frozen=True, slots=True)
class Request:
    """What a page function is given.

    Attributes:
        who: the person who has signed in; None if nobody has to.
    """

    reader: Reader
    query: QueryParams
    settings: DashboardSettings
    runner: LetterRunner
    who: str | None = None

    def number(self, name: str, default: int, most: int = 2**62) -> int:
        """Return a parameter that is a whole number from 0 on, or the default."""
        text = self.query.get(name, "")
        return min(int(text), most) if text.isascii() and text.isdigit() and len(text) < _DIGITS else default


NONE = "\N{EN DASH}"
"""Shown for what is unknown or absent."""

PageFunction = Callable[[Request], Page]


@cache
def _environment() -> Environment:
    """Return the templates, which are compiled once for a process, however many dashboards it has."""
    environment = Environment(
        loader=PackageLoader("txbox_dashboard"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "count": count,
        "rate": rate,
        "span": span,
        "size": size,
        "moment": moment,
        "iso": iso,
        "spark": spark,
        "query": query_of,
    }
    environment.globals["version"] = __version__
    return environment


class Renderer:
    def __init__(self) -> None:
        self._templates = _environment()

    def html(self, page: Page, **shared: Any) -> str:
        """Return a page as HTML. ``shared`` are the layout's values."""
        return self._templates.get_template(page.template).render(**page.values, **shared)


def count(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def rate(per_second: float | None) -> str:
    if per_second is None:
        return NONE
    return f"{per_second:,.0f}" if per_second >= _PLAIN_RATE or per_second == 0 else f"{per_second:.2g}"


def span(seconds: float | None) -> str:
    """Return a span of time in its two largest units."""
    if seconds is None or not math.isfinite(seconds):
        return NONE
    left = abs(seconds)
    if left < 1:
        return "0 s" if left < _SHORT_SECONDS else f"{left * 1000:.0f} ms"
    parts: list[str] = []
    for unit, length in _UNITS:
        whole, left = divmod(left, length)
        if whole or parts:
            parts.append(f"{whole:.0f} {unit}")
        if len(parts) == _SHOWN_UNITS:
            break
    return ("-" if seconds < 0 else "") + " ".join(part for part in parts if not part.startswith("0 "))


def size(count_of_bytes: float | None) -> str:
    if count_of_bytes is None:
        return NONE
    value, unit = float(count_of_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < _LARGER_AT:
            break
        value, unit = value / 1000, larger
    return f"{value:,.0f} {unit}" if unit == "B" or value >= _PLAIN_RATE else f"{value:.1f} {unit}"


def moment(at: datetime | None) -> str:
    """Return a time in UTC, for people."""
    return NONE if at is None else f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def iso(at: datetime) -> str:
    return at.astimezone(UTC).isoformat()


def spark(counts: Sequence[float], width: int = 120, height: int = 28) -> str:
    """Return the points of a sparkline: an SVG polyline of this size, with the first count at the left."""
    most = max(counts, default=0) or 1
    step = width / max(len(counts) - 1, 1)
    return " ".join(
        f"{place * step:.1f},{height - 1 - each / most * (height - 2):.1f}" for place, each in enumerate(counts)
    )


def query_of(values: Mapping[str, object]) -> str:
    """Return a URL's query, without values that are None or empty."""
    return urlencode({name: value for name, value in values.items() if value not in (None, "")}, errors="replace")


_UNITS = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))
_SHOWN_UNITS = 2
_SHORT_SECONDS = 0.0005
_PLAIN_RATE = 10
_LARGER_AT = 1000
_DIGITS = 19
