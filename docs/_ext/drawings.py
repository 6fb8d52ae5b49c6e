"""The drawings of the concepts, as SVG: ``python docs/_ext/drawings.py`` writes them beside their pages, and a test compares them.

A drawing is a list of shapes in pixels. It carries its own background, so it reads on a light page and on a dark one, and follows the system's
choice. Words must fit their boxes in any font, so `Drawing.box` refuses a line that a wide font would not fit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).resolve().parents[1] / "concepts"
SIZE: Final = 14
"""Of letters, in pixels."""
WIDEST: Final = 0.6
"""Mean width of a letter over its size, in wide fonts."""
STYLE: Final = """
  text { font: 14px system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif; fill: #1d2733; }
  .small { font-size: 12px; fill: #51606f; }
  .title { font-weight: 600; }
  .page { fill: #fbfcfd; stroke: #d5dbe1; }
  .plain { fill: #f0f2f5; stroke: #8a96a3; }
  .data { fill: #dcebfb; stroke: #3b78b8; }
  .task { fill: #fdeccf; stroke: #c07a12; }
  .memory { fill: #dff3e4; stroke: #35804c; }
  .worker { fill: #ece3f8; stroke: #7a50b0; }
  .hot { fill: #fbdcd8; stroke: #b8443a; }
  .line { fill: none; stroke: #51606f; stroke-width: 1.6; }
  .dashed { stroke-dasharray: 5 4; }
  .head { fill: #51606f; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e4eaf1; }
    .small { fill: #a9b5c2; }
    .page { fill: #161b22; stroke: #39434e; }
    .plain { fill: #262d36; stroke: #7d8996; }
    .data { fill: #173452; stroke: #6ca9e6; }
    .task { fill: #4a3411; stroke: #e0a03c; }
    .memory { fill: #17391f; stroke: #62b97c; }
    .worker { fill: #35254f; stroke: #ab86df; }
    .hot { fill: #4c1f1b; stroke: #e0786e; }
    .line { stroke: #a9b5c2; }
    .head { fill: #a9b5c2; }
  }
"""


class Drawing:
    """Shapes on a card of a size.

    Args:
        name: of the file.
        about: what it shows, for readers who cannot see it.
    """

    def __init__(self, name: str, width: int, height: int, about: str) -> None:
        self.name, self.width, self.height, self.about = name, width, height, about
        self._shapes: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, text: str = "", kind: str = "plain", *, small: bool = False, dashed: bool = False) -> None:
        """A rectangle with centred lines of text.

        Raises:
            ValueError: a line is too long for it.
        """
        lines = text.split("\n") if text else []
        size = 12 if small else SIZE
        for line in lines:
            if len(line) * WIDEST * size > w + 4:
                raise ValueError(f"{self.name}: {line!r} needs {len(line) * WIDEST * size:.0f} pixels, the box has {w}")
        self._shapes.append(f'<rect class="{kind}{" dashed" if dashed else ""}" x="{x}" y="{y}" width="{w}" height="{h}" rx="5"/>')
        first = y + h / 2 - (len(lines) - 1) * (size + 4) / 2 + size * 0.36
        for number, line in enumerate(lines):
            self.text(x + w / 2, first + number * (size + 4), line, "small" if small else "", anchor="middle")

    def text(self, x: float, y: float, text: str, kind: str = "", *, anchor: str = "start") -> None:
        """A line of text, by its baseline."""
        style = f' class="{kind}"' if kind else ""
        self._shapes.append(f'<text{style} x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>')

    def arrow(self, *points: tuple[float, float], dashed: bool = False) -> None:
        """A line through points with a head at the last one."""
        path = " L".join(f"{x:g} {y:g}" for x, y in points)
        self._shapes.append(f'<path class="line{" dashed" if dashed else ""}" d="M{path}" marker-end="url(#head)"/>')

    def line(self, *points: tuple[float, float], dashed: bool = False) -> None:
        """A line through points."""
        path = " L".join(f"{x:g} {y:g}" for x, y in points)
        self._shapes.append(f'<path class="line{" dashed" if dashed else ""}" d="M{path}"/>')

    def grid(
        self, x: float, y: float, columns: Sequence[float], rows: Sequence[float], kind: str, marked: frozenset[tuple[int, int]] = frozenset()
    ) -> None:
        """Tiles of a tensor, by the widths of its columns and the heights of its rows; those `marked`, (row, column), stand out."""
        top = y
        for i, height in enumerate(rows):
            left = x
            for j, width in enumerate(columns):
                self._shapes.append(
                    f'<rect class="{"task" if (i, j) in marked else kind}" x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}"/>'
                )
                left += width
            top += height

    def svg(self) -> str:
        """The file."""
        head = (
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto-start-reverse">'
            '<path class="head" d="M0 0 L8 4 L0 8 z"/></marker>'
        )
        size = f'width="{self.width}" height="{self.height}"'
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" {size} role="img">',
            f"<title>{escape(self.about)}</title>",
            f"<style>{STYLE}</style>",
            f"<defs>{head}</defs>",
            f'<rect class="page" x="0.5" y="0.5" width="{self.width - 1}" height="{self.height - 1}" rx="8"/>',
            *self._shapes,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


def tiles_and_tasks() -> Drawing:
    """A product cut into tiles, and the chain of tasks of one tile of the result."""
    d = Drawing("tiles-and-tasks", 760, 330, "A product of two tiled matrices, and the three tasks that make one tile of the result")
    d.text(24, 34, "tensors are grids of tiles", "title")
    d.grid(24, 78, (56, 56, 40), (56, 56), "data", frozenset({(0, 0), (0, 1), (0, 2)}))
    d.text(100, 68, "X  (2 x 3 tiles)", "small", anchor="middle")
    d.text(193, 140, "@", anchor="middle")
    d.grid(212, 58, (56, 56), (56, 56, 40), "data", frozenset({(0, 1), (1, 1), (2, 1)}))
    d.text(268, 48, "W  (3 x 2 tiles)", "small", anchor="middle")
    d.text(341, 140, "=", anchor="middle")
    d.grid(358, 78, (56, 56), (56, 56), "data", frozenset({(0, 1)}))
    d.text(414, 68, "Y  (2 x 2 tiles)", "small", anchor="middle")
    d.text(24, 240, "Each tile is a data handle.", "small")
    d.text(24, 260, "Edges may be ragged.", "small")
    d.text(24, 280, "Tiles of Y need nothing of each other:", "small")
    d.text(24, 300, "four chains of tasks can run at once.", "small")

    d.text(500, 34, "a tile of Y: a chain of tasks", "title")
    for number in range(3):
        y = 56 + number * 76
        d.box(510, y, 120, 44, f"X[0,{number}]  W[{number},1]", "data")
        d.arrow((632, y + 22), (656, y + 22))
        d.box(660, y, 76, 44, "matmul", "task")
        if number < 2:
            d.arrow((698, y + 46), (698, y + 73))
            d.text(690, y + 64, "Y[0,1], added to" if number else "Y[0,1], written", "small", anchor="end")
    d.arrow((698, 254), (698, 276))
    d.box(660, 280, 76, 32, "Y[0,1]", "data")
    return d


def scheduler() -> Drawing:
    """Events go into the machine, actions come out."""
    d = Drawing(
        "scheduler", 760, 380, "The program submits tasks; the machine turns events into actions; workers, copy engines and the disk carry them out"
    )
    d.box(24, 24, 200, 56, "program\nsubmits in order", "plain")
    d.arrow((124, 82), (124, 126))
    d.text(134, 108, "TaskSubmitted", "small")
    d.box(24, 130, 712, 124, "", "plain")
    d.text(40, 154, "the machine: events in, actions out; no threads, no clock", "title")
    for number, (text, kind) in enumerate(
        (
            ("dependencies\nwho waits for whom", "task"),
            ("policy\nwhich task next", "worker"),
            ("admission\nbytes reserved", "memory"),
            ("coherence\nwhere copies are", "data"),
        )
    ):
        d.box(40 + number * 174, 172, 158, 64, text, kind)
        if number < 3:
            d.arrow((200 + number * 174, 204), (211 + number * 174, 204))
    for x, name in ((100, "RunTask"), (330, "CopyTile"), (560, "CopyTile")):
        d.arrow((x, 256), (x, 306))
        d.text(x - 6, 286, name, "small", anchor="end")
        d.arrow((x + 60, 306), (x + 60, 256), dashed=True)
    d.text(168, 286, "TaskFinished", "small")
    d.text(398, 286, "CopyFinished", "small")
    d.text(628, 286, "CopyFinished", "small")
    d.box(40, 310, 200, 48, "workers: CPU, GPU", "worker")
    d.box(270, 310, 200, 48, "copy engines", "memory")
    d.box(500, 310, 200, 48, "disk tier, files", "memory")
    d.text(250, 48, "A thread that finished a kernel takes the lock, advances the machine,", "small")
    d.text(250, 66, "and leaves with its next task: there is no scheduler thread.", "small")
    return d


def memory() -> Drawing:
    """Memory nodes with budgets, replicas, and what moves between them."""
    d = Drawing(
        "memory", 760, 360, "Three memory nodes with budgets; replicas of tiles; fetching upwards, write-back downwards, dropping of clean copies"
    )
    for x, name, budget in ((24, "device", "budget 60 MB"), (284, "RAM", "budget 650 MB"), (544, "disk", "all that lives")):
        d.box(x, 44, 192, 232, "", "plain")
        d.text(x, 34, name, "title")
        d.text(x + 192, 34, budget, "small", anchor="end")
    d.box(36, 60, 78, 36, "weight 7", "data")
    d.box(126, 60, 78, 36, "x", "hot")
    d.box(36, 108, 168, 36, "scratch of a task", "task", small=True)
    d.box(126, 156, 78, 36, "weight 8", "plain", dashed=True)
    d.box(296, 60, 78, 36, "weight 7", "data")
    d.box(386, 60, 78, 36, "weight 9", "plain", dashed=True)
    d.box(386, 108, 78, 36, "moment 3", "hot")
    d.box(296, 156, 78, 36, "weight 8", "data")
    for number, name in enumerate(("weight 9", "weight 8", "moment 3", "x", "weight 7")):
        has_slot = name in ("moment 3", "x")
        d.box(556 + 90 * (number % 2), 60 + 48 * (number // 2), 78, 36, name, "plain" if has_slot else "data", dashed=has_slot)
    d.arrow((294, 174), (207, 174))
    d.text(250, 168, "fetch", "small", anchor="middle")
    d.arrow((466, 126), (553, 126))
    d.text(510, 120, "write back", "small", anchor="middle")
    d.arrow((554, 78), (467, 78))
    d.text(510, 72, "fetch", "small", anchor="middle")
    d.text(36, 230, "x was written here:", "small")
    d.text(36, 248, "no other copy is valid", "small")
    d.text(296, 230, "weight 8 is on disk, too:", "small")
    d.text(296, 248, "eviction may drop it", "small")
    d.text(556, 230, "a slot is reserved for", "small")
    d.text(556, 248, "each later write-back", "small")
    d.box(24, 296, 20, 20, "", "data")
    d.text(52, 311, "clean replica", "small")
    d.box(164, 296, 20, 20, "", "hot")
    d.text(192, 311, "modified: the only valid replica", "small")
    d.box(410, 296, 20, 20, "", "plain", dashed=True)
    d.text(438, 311, "bytes reserved, not valid yet", "small")
    d.text(24, 342, "A task is admitted to a node when all its missing bytes are reserved in one step; otherwise it holds nothing.", "small")
    return d


def recorded_steps() -> Drawing:
    """A step is captured, planned, and replayed twice at a time."""
    d = Drawing(
        "recorded-steps", 760, 330, "A step is captured from shapes, planned once, and replayed; two replays overlap while the program reads losses"
    )
    for x, w, text, kind in (
        (24, 150, "record()\nshapes only", "plain"),
        (204, 150, "plan\norder, lifetimes", "memory"),
        (384, 170, "two instances\nof the step", "data"),
    ):
        d.box(x, 24, w, 56, text, kind)
    d.arrow((176, 52), (201, 52))
    d.arrow((356, 52), (381, 52))
    d.text(572, 48, "captured and planned once,", "small")
    d.text(572, 66, "replayed for every batch", "small")
    d.line((24, 104), (736, 104), dashed=True)
    d.text(24, 140, "program", "title")
    for number in range(3):
        x = 110 + number * 200
        d.box(x, 120, 88, 32, f"replay {number + 1}", "plain")
        if number < 2:
            d.box(x + 294, 120, 58, 32, f"read {number + 1}", "plain", small=True)
    d.text(24, 202, "worker 0", "title")
    d.text(24, 252, "worker 1", "title")
    for number, kind in enumerate(("task", "worker", "task")):
        x = 130 + number * 200
        w = 196 if number < 2 else 186
        d.box(x, 182, w, 32, f"tasks of step {number + 1}", kind)
        d.box(x + 14, 232, w if number < 2 else w - 14, 32, f"tasks of step {number + 1}", kind)
        d.arrow((110 + number * 200 + 44, 153), (x + 24, 180))
    d.text(24, 296, "A replay waits, tile by tile, for the last access in the one before it, and not for its end.", "small")
    d.text(24, 314, "read 1 waits for the loss of replay 1 while replay 2 runs.", "small")
    return d


def determinism() -> Drawing:
    """One order of a sum, whatever runs where."""
    d = Drawing("determinism", 760, 320, "Eight contributions to a gradient tile in submission order, two partial accumulators, one fixed tree")
    d.text(24, 34, "contributions to one gradient tile, in submission order", "title")
    for number in range(8):
        x = 24 + number * 89
        d.box(x, 52, 76, 38, f"dW {number}", "task")
        lane = number % 2
        d.arrow((x + 38, 92), (x + 38, 138 if lane == 0 else 190))
    d.box(24, 142, 610, 34, "accumulator 0:  ((dW 0 + dW 2) + dW 4) + dW 6", "data")
    d.box(113, 194, 610, 34, "accumulator 1:  ((dW 1 + dW 3) + dW 5) + dW 7", "data")
    d.arrow((60, 178), (60, 272), (128, 272))
    d.arrow((240, 230), (240, 251))
    d.box(130, 254, 250, 36, "accumulator 0 + accumulator 1", "memory")
    d.text(400, 268, "--lanes 2: contribution i goes to accumulator i mod 2.", "small")
    d.text(400, 286, "Which worker runs which task, and when, changes no bit.", "small")
    return d


def devices_and_nodes() -> Drawing:
    """Minibatches on devices, devices in nodes, one owner of each tile."""
    d = Drawing(
        "devices-and-nodes",
        760,
        370,
        "Two nodes with two devices each; each device computes whole minibatches; partial sums go to the owner of a tile and parameters come back",
    )
    for node, x in enumerate((24, 404)):
        d.box(x, 44, 332, 222, "", "plain")
        d.text(x, 34, f"node {node}", "title")
        for device in range(2):
            left = x + 16 + device * 156
            first = node * 4 + device * 2
            d.box(left, 60, 144, 84, "", "worker")
            d.text(left + 10, 80, f"device {device}")
            d.box(left + 10, 90, 124, 20, f"minibatch {first}", "task", small=True)
            d.box(left + 10, 116, 124, 20, f"minibatch {first + 1}", "task", small=True)
            d.arrow((left + 72, 146), (left + 72, 184))
        d.box(x + 16, 188, 300, 64, "RAM: sums of this node's lanes\ntiles that this node owns", "memory")
    d.arrow((342, 204), (416, 204))
    d.arrow((418, 236), (344, 236))
    d.text(380, 290, "partial sums of gradient tiles to their owner; updated parameter tiles back", "small", anchor="middle")
    d.text(24, 322, "Activations stay on the device of their minibatch; weights and gradients travel.", "small")
    d.text(24, 342, "A node takes whole lanes with the minibatches that belong to them, so a sum has one tree on any number of nodes.", "small")
    return d


DRAWINGS: Final[tuple[Callable[[], Drawing], ...]] = (tiles_and_tasks, scheduler, memory, recorded_steps, determinism, devices_and_nodes)


def main() -> int:
    """Write the files, or with --check say which are stale."""
    stale = []
    for make in DRAWINGS:
        drawing = make()
        path = FOLDER / f"{drawing.name}.svg"
        if not path.exists() or path.read_text() != drawing.svg():
            stale.append(path.name)
            if "--check" not in sys.argv:
                path.write_text(drawing.svg())
    if "--check" in sys.argv and stale:
        print(f"stale: {', '.join(stale)}; run: python docs/_ext/drawings.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
