"""A ``diagram`` fence holds a drawing of box characters; the site shows it as an SVG in the colours of the page.

In the repository the text is the picture. Each character is a cell of a grid: a box character becomes lines from the
middle of the cell, a triangle an arrow head, everything else stays text.
"""

import re
from html import escape

WIDTH, HEIGHT = 8.4, 18.0
"""The size of a cell in pixels, for text of 14 pixels."""
RIGHT, LEFT, DOWN, UP = (1, 0), (-1, 0), (0, 1), (0, -1)
LINES = {
    "─": (LEFT, RIGHT),
    "│": (UP, DOWN),
    "┌": (RIGHT, DOWN),
    "┐": (LEFT, DOWN),
    "└": (RIGHT, UP),
    "┘": (LEFT, UP),
    "├": (UP, DOWN, RIGHT),
    "┤": (UP, DOWN, LEFT),
    "┬": (LEFT, RIGHT, DOWN),
    "┴": (LEFT, RIGHT, UP),
    "┼": (LEFT, RIGHT, UP, DOWN),
}
HEADS = {"▶": RIGHT, "◀": LEFT, "▼": DOWN, "▲": UP}
_FENCE = re.compile(r'^```diagram title="([^"]+)"\n(.*?)^```$', re.M | re.S)
_TEXT = re.compile(
    rf"[^\s{''.join([*LINES, *HEADS])}]+(?: [^\s{''.join([*LINES, *HEADS])}]+)*"
)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Put an SVG in the place of each ``diagram`` fence."""
    return _FENCE.sub(lambda found: svg(found[2], found[1]), markdown)


def svg(drawing: str, title: str) -> str:
    """Return a drawing as one line of SVG, in a box that scrolls where the screen is narrower, by the keyboard too.

    Args:
        drawing: lines of text and box characters.
        title: what the picture shows, for readers who do not see it.
    """
    rows = drawing.splitlines()
    parts: list[str] = []
    for y, row in enumerate(rows):
        for x, character in enumerate(row):
            if character in LINES:
                parts.append(_lines(x, y, LINES[character]))
            elif character in HEADS:
                parts.append(_head(x, y, *HEADS[character]))
        for found in _TEXT.finditer(row):
            parts.append(
                f'<text x="{found.start() * WIDTH:g}" y="{y * HEIGHT + 13:g}" '
                f'textLength="{len(found[0]) * WIDTH:g}">{escape(found[0])}</text>'
            )
    width, height = max(map(len, rows)) * WIDTH, len(rows) * HEIGHT
    return (
        '<div class="drawing" tabindex="0">'
        f'<svg class="diagram" role="img" aria-label="{escape(title)}" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}">{"".join(parts)}</svg></div>'
    )


def _lines(x: int, y: int, ends: tuple[tuple[int, int], ...]) -> str:
    middle = f"M{(x + 0.5) * WIDTH:g} {(y + 0.5) * HEIGHT:g}"
    path = "".join(
        f"{middle}l{dx * WIDTH / 2:g} {dy * HEIGHT / 2:g}" for dx, dy in ends
    )
    return f'<path class="line" d="{path}"/>'


def _head(x: int, y: int, dx: int, dy: int) -> str:
    """A triangle whose tip is at the edge of its cell; behind it, the line goes on."""
    middle_x, middle_y = (x + 0.5) * WIDTH, (y + 0.5) * HEIGHT
    half = WIDTH / 2 if dx else HEIGHT / 2
    tip_x, tip_y = middle_x + dx * half, middle_y + dy * half
    back_x, back_y = tip_x - dx * WIDTH, tip_y - dy * WIDTH
    side_x, side_y = dy * WIDTH / 2, dx * WIDTH / 2
    tail = (
        f"M{middle_x - dx * half:g} {middle_y - dy * half:g}L{back_x:g} {back_y:g}"
    )
    return (
        f'<path class="line" d="{tail}"/>'
        f'<path d="M{tip_x:g} {tip_y:g}L{back_x + side_x:g} {back_y + side_y:g}'
        f'L{back_x - side_x:g} {back_y - side_y:g}z"/>'
    )
