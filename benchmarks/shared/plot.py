"""Figures as a picture: bars in SVG, drawn without the network, readable on light and on dark pages.

Each bar has its value and its ratio beside it, so that the colours only help: ours, and the limit or another way.
"""

from collections.abc import Sequence
from html import escape

from benchmarks.shared.measurements import Figures, Row, Table
from benchmarks.shared.report import number

WIDTH, MARGIN, LABELS, BARS = 760, 20, 270, 280
LINE, BAR = 22, 14

STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f } .title { font-size: 16px; font-weight: 600 }
.section { font-weight: 600 } .origin { font-size: 11px; fill: #57606a } .card { fill: #ffffff; stroke: #d0d7de }
.ours { fill: #0969da } .other { fill: #8c959f }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .origin { fill: #9198a1 } .card { fill: #161b22; stroke: #30363d }
.ours { fill: #4493f8 } .other { fill: #7d8590 } }"""
"""The card is painted, too: text and ground always belong to the same scheme, whatever the page has chosen."""


def draw(title: str, tables: Sequence[Table], figures: Figures) -> str:
    """Return an SVG of what was measured.

    Args:
        title: above it.
        tables: those that are plotted become sections; the bars of a section have one scale.
        figures: what was measured.
    """
    parts = [_text("title", MARGIN, 34, title)]
    y = 52
    for table in tables:
        rows = [row for row in table.rows if row.key in figures]
        if not rows or not table.plotted:
            continue
        y += LINE + 4
        parts.append(_text("section", MARGIN, y, table.title))
        most = max(figures.spread(row.key).median for row in rows)
        for row in rows:
            y += LINE
            parts += _bar(y, row, figures, most)
    for line in _origin(figures):
        y += 18 if parts[-1].startswith('<text class="origin"') else 30
        parts.append(_text("origin", MARGIN, y, line))
    height = y + MARGIN
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">
<title>{escape(title)}</title>
<style>{STYLE}
</style>
<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="6"/>
{chr(10).join(parts)}
</svg>
"""


def _bar(y: int, row: Row, figures: Figures, most: float) -> list[str]:
    median = figures.spread(row.key).median
    ratio = figures.ratio(row.key, row.to) if row.to is not None else None
    value = f"{number(median)} {row.unit}" + (f"  ({ratio.median:.2f}x)" if ratio else "")
    start, length = MARGIN + LABELS, max(BARS * median / most, 1.0) if most else 1.0
    size = f'x="{start}" y="{y - BAR + 2}" width="{length:.1f}" height="{BAR}" rx="2"'
    return [
        _text("label", MARGIN, y, row.key),
        f'<rect class="{"ours" if row.ours else "other"}" {size}/>',
        _text("value", start + length + 8, y, value),
    ]


def _origin(figures: Figures) -> list[str]:
    """Lines that say what it was measured on."""
    origin, machine, versions = figures.origin, figures.origin["machine"], figures.origin["versions"]
    server = f"PostgreSQL {origin['server']['version']}, Python {versions['python']}, psycopg {versions['psycopg']}"
    return [
        f"Blue: txbox. Grey: what it is compared with; in brackets: the ratio. Rounds: {figures.options['rounds']}.",
        f"{origin['measured_at'][:10]}, load average {machine['load']} at the start; {server}",
        f"{machine['processors']} processors, {machine['processor']}, {machine['system']}",
        *([origin["note"]] if "note" in origin else []),
    ]


def _text(kind: str, x: float, y: int, text: str) -> str:
    return f'<text class="{kind}" x="{x:.0f}" y="{y}">{escape(text)}</text>'
