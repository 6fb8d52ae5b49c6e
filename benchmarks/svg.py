"""Drawings as SVG text, readable on a light and on a dark page.

A drawing brings its own background and two sets of colours. Elements name a colour by its class (`ink`, `blue-fill`, ...); the second set holds where
the reader's system asks for dark pages. A renderer that ignores media queries shows the first set, which is complete on its own.

Units are pixels of the drawing's own width, y runs downwards. Coordinates are written with one decimal, so the text is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal
from xml.sax.saxutils import escape

Anchor = Literal["start", "middle", "end"]
Point = tuple[float, float]

LIGHT: Final = {
    "paper": "#ffffff",
    "frame": "#d1d9e0",
    "ink": "#1f2328",
    "muted": "#59636e",
    "grid": "#d8dee4",
    "panel": "#f6f8fa",
    "blue": "#0969da",
    "blue-tint": "#d6ebff",
    "orange": "#bc4c00",
    "orange-tint": "#ffe2cc",
    "green": "#1a7f37",
    "green-tint": "#d2f5dc",
    "gray": "#818b98",
    "gray-tint": "#e6eaef",
}
DARK: Final = {
    "paper": "#0d1117",
    "frame": "#3d444d",
    "ink": "#f0f6fc",
    "muted": "#9198a1",
    "grid": "#2a313c",
    "panel": "#151b23",
    "blue": "#58a6ff",
    "blue-tint": "#12355f",
    "orange": "#f0883e",
    "orange-tint": "#4d2a10",
    "green": "#3fb950",
    "green-tint": "#12401f",
    "gray": "#768390",
    "gray-tint": "#262c36",
}
TEXT_FONT: Final = "-apple-system, BlinkMacSystemFont, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"
CODE_FONT: Final = "ui-monospace, SFMono-Regular, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"


_HEAD: Final = (
    '<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto" markerUnits="userSpaceOnUse">'
    '<path d="M0 0.5L8 4L0 7.5z" class="{name}-fill"/></marker>'
)
"""The head of an arrow of one colour."""


def _rules(colours: dict[str, str]) -> str:
    """CSS rules `.NAME-fill` and `.NAME-line` for each colour."""
    return "".join(f".{name}-fill{{fill:{value}}}.{name}-line{{stroke:{value}}}" for name, value in colours.items())


class Drawing:
    """A drawing that grows element by element; what is added later lies on top.

    Args:
        width: of the drawing, which a page scales to its own width.
        height: of the drawing.
        title: the drawing in one sentence, which screen readers read.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self._width, self._height, self._title = width, height, title
        self._elements: list[str] = []
        self.box(0.5, 0.5, width - 1, height - 1, fill="paper", line="frame", radius=8)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str = "",
        line: str = "",
        radius: float = 3,
        stroke: float = 1,
        dashed: bool = False,
    ) -> None:
        """A rectangle with its upper left corner at (x, y); without `fill` it is empty, without `line` it has no border."""
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius:g}"'
        self._elements.append(f"<rect {place} {_paint(fill, line)} {_stroke(stroke, dashed)}/>")

    def dot(self, x: float, y: float, radius: float, *, fill: str = "", line: str = "") -> None:
        """A circle around (x, y)."""
        self._elements.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" {_paint(fill, line)} stroke-width="1.2"/>')

    def path(self, points: Sequence[Point], *, line: str = "muted", stroke: float = 1.2, dashed: bool = False, arrow: bool = False) -> None:
        """A line through the points, with a head at its end if it is an arrow."""
        drawn = " ".join(f"{'L' if number else 'M'}{x:.1f} {y:.1f}" for number, (x, y) in enumerate(points))
        head = f' marker-end="url(#{line})"' if arrow else ""
        self._elements.append(f'<path d="{drawn}" {_paint("", line)} {_stroke(stroke, dashed)}{head}/>')

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 14,
        colour: str = "ink",
        anchor: Anchor = "start",
        bold: bool = False,
        code: bool = False,
    ) -> None:
        """A line of text whose baseline passes through (x, y)."""
        kind = " ".join([f"{colour}-fill", *(["code"] if code else []), *(["bold"] if bold else [])])
        place = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self._elements.append(f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" font-size="{size:g}"{place}>{escape(words)}</text>')

    def lines(self, x: float, y: float, words: Iterable[str], *, size: float = 13, colour: str = "muted", leading: float = 18) -> None:
        """Lines of text below each other, the first with its baseline at y."""
        for number, line in enumerate(words):
            self.text(x, y + number * leading, line, size=size, colour=colour)

    def svg(self) -> str:
        """The whole drawing as the text of a file."""
        style = f"text{{font-family:{TEXT_FONT}}}.code{{font-family:{CODE_FONT}}}.bold{{font-weight:600}}"
        style += f"{_rules(LIGHT)}@media (prefers-color-scheme:dark){{{_rules(DARK)}}}"
        drawn = "".join(self._elements)
        heads = "".join(_HEAD.format(name=name) for name in LIGHT if f'marker-end="url(#{name})"' in drawn)
        size = f'width="{self._width}" height="{self._height}" viewBox="0 0 {self._width} {self._height}"'
        opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(self._title, {chr(34): "&quot;"})}">'
        parts = [opening, f"<title>{escape(self._title)}</title>", f"<style>{style}</style>", *([f"<defs>{heads}</defs>"] if heads else [])]
        return "\n".join([*parts, *self._elements, "</svg>"]) + "\n"


def _paint(fill: str, line: str) -> str:
    """Class and fill attributes of a shape."""
    classes = " ".join([*([f"{fill}-fill"] if fill else []), *([f"{line}-line"] if line else [])])
    return f'class="{classes}"' + ("" if fill else ' fill="none"')


def _stroke(width: float, dashed: bool) -> str:
    """Attributes of a line of this width."""
    return f'stroke-width="{width:g}"' + (' stroke-dasharray="4 3"' if dashed else "")
