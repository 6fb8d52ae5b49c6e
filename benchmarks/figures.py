"""The figures of README.md: two plots made from the committed results, and the drawing of a step.

`python benchmarks/table.py` writes them into docs/images; this file says what is in them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any, Final

from svg import Drawing

Results = Mapping[str, Mapping[str, Any]]
"""Committed results by the name of their benchmark."""

PARTS: Final = (("half", "1/2"), ("quarter", "1/4"), ("eighth", "1/8"))
"""Budgets of the benchmark `memory`: its name for each, and the part of the needed bytes."""
WIDTH: Final = 880


def figures(results: Results) -> dict[str, str]:
    """Name of a file in docs/images -> its text."""
    return {"speed.svg": speed(results), "bytes.svg": moved_bytes(results), "step.svg": step()}


def speed(results: Results) -> str:
    """Speed against the RAM budget: bars for the medians, a dot for each round."""
    memory = results["memory"]
    needed = memory["needed_bytes"]
    bars: list[tuple[str, str, float, list[float]]] = [("all it needs", _bytes(needed), 1.0, [])]
    for name, part in PARTS:
        limited, free = memory["runs"][f"{name}, beside unlimited"], memory["runs"][f"unlimited, beside {name}"]
        rounds = [other / own for own, other in zip(limited["seconds"], free["seconds"], strict=True)]
        ratio = statistics.median(free["seconds"]) / statistics.median(limited["seconds"])
        bars.append((f"{part} of it", _bytes(limited["budget_bytes"]["ram"]), ratio, rounds))
    drawing = Drawing(WIDTH, 340, "Training speed of GPT-2 small against its RAM budget, as a share of the speed without a limit")
    drawing.text(28, 36, "GPT-2 small keeps its speed while its RAM budget shrinks", size=17, bold=True)
    told = "Share of the speed of the same run without a limit; what does not fit lies on the disk; losses are the same bits"
    drawing.text(28, 58, told, size=13, colour="muted")
    left, right, top, bottom = 70, 856, 84, 262
    for percent in range(0, 101, 25):
        y = bottom - (bottom - top) * percent / 100
        drawing.path([(left, y), (right, y)], line="grid", stroke=1)
        drawing.text(left - 10, y + 4, f"{percent} %", size=12, colour="muted", anchor="end")
    slot = (right - left) / len(bars)
    for number, (label, amount, ratio, rounds) in enumerate(bars):
        middle, height = left + slot * (number + 0.5), (bottom - top) * ratio
        colour = "gray" if number == 0 else "blue"
        drawing.box(middle - 52, bottom - height, 104, height, fill=f"{colour}-tint", line=colour)
        for place, one in enumerate(rounds):
            drawing.dot(middle + (place - (len(rounds) - 1) / 2) * 18, bottom - (bottom - top) * one, 3.2, fill=colour, line="paper")
        drawing.text(middle, bottom - height + 34, f"{100 * ratio:.0f} %", size=20, anchor="middle", bold=True)
        drawing.text(middle, bottom + 20, f"RAM: {amount}", size=14, anchor="middle", bold=True)
        drawing.text(middle, bottom + 38, label, size=13, anchor="middle", colour="muted")
    how = f"{memory['machine']['cores']} CPU cores; 8 x 1,024 tokens a step, fp32; bars: medians, dots: rounds"
    drawing.text(28, 326, f"{_stamp(memory)}; {how}", size=12, colour="muted")
    return drawing.svg()


def moved_bytes(results: Results) -> str:
    """Bytes a step moves between RAM and disk: LRU, the planned order and its lower bound, and what was measured."""
    rows = results["foresight_bytes"]["comparisons"]
    measured = results["memory"]["gigabytes_per_step"]
    found = {"lru": measured["quarter, eager + lru, submission order"]}
    groups: list[tuple[str, float, float, float, float]] = []
    for name, part in PARTS:
        beside = {row["peer"]: row for row in rows if row["what"].startswith(f"RAM at {part},")}
        lru, bound = beside["eager + lru"], beside["LP bound of that order"]
        groups.append((part, lru["theirs"], lru["ours"], bound["theirs"], measured[f"{name}, beside unlimited"]))
    drawing = Drawing(WIDTH, 340, "Bytes that a training step of GPT-2 small moves between RAM and disk, by RAM budget and policy")
    drawing.text(28, 36, "A planned order moves close to the fewest bytes that order allows", size=17, bold=True)
    told = "GB moved between RAM and disk in a step of GPT-2 small, both directions, in virtual time; dots: measured in real runs"
    drawing.text(28, 58, told, size=13, colour="muted")
    left, right, top, bottom, most = 60, 856, 112, 272, 40.0
    for value in range(0, 41, 10):
        y = bottom - (bottom - top) * value / most
        drawing.path([(left, y), (right, y)], line="grid", stroke=1)
        drawing.text(left - 10, y + 4, f"{value}", size=12, colour="muted", anchor="end")
    series = (
        ("orange", "submission order, LRU eviction", 56),
        ("blue", "planned order, eviction by next use (the default)", 294),
        ("gray", "lower bound of that order", 656),
    )
    for colour, name, x in series:
        drawing.box(x, 76, 14, 14, fill=f"{colour}-tint", line=colour)
        drawing.text(x + 20, 88, name, size=13)
    slot, width = (right - left) / len(groups), 66
    for number, (part, *values, real) in enumerate(groups):
        middle = left + slot * (number + 0.5)
        for place, (value, (colour, _, _)) in enumerate(zip(values, series, strict=True)):
            x, height = middle + (place - 1.5) * (width + 6), (bottom - top) * value / most
            drawing.box(x, bottom - height, width, height, fill=f"{colour}-tint", line=colour)
            drawing.text(x + width / 2, bottom - height - 9, f"{value:.1f}", size=13, anchor="middle", bold=True)
        marks = [(1, real, "blue")] + ([(0, found["lru"], "orange")] if part == "1/4" else [])
        for place, value, colour in marks:
            drawing.dot(middle + (place - 1.5) * (width + 6) + width / 2, bottom - (bottom - top) * value / most, 3.6, fill=colour, line="paper")
        drawing.text(middle, bottom + 20, f"RAM at {part} of what the step needs", size=13, anchor="middle")
    drawing.text(28, 326, f"computed: {_stamp(results['foresight_bytes'])}; dots: {_stamp(results['memory'])}", size=12, colour="muted")
    return drawing.svg()


def step() -> str:
    """How a training step flows from the program to tiles, tasks, workers and memories, one row each; one task is followed through all of them."""
    drawing = Drawing(WIDTH, 572, "A training step flows from the program to tiles, tasks, workers and memories")
    rows = (
        (20, "1  Program", ("plain Python, recorded once from", "shapes, then replayed each step")),
        (112, "2  Tiles", ("every tensor is cut into tiles;", "a tile is what tasks and copies handle")),
        (220, "3  Tasks", ("one operation on a few tiles each;", "edges follow from reads and writes")),
        (334, "4  Workers", ("the scheduler decides, task by task,", "which worker runs what, and when")),
        (440, "5  Memories", ("each has a hard byte budget; tiles", "come before they are used and leave", "when their next use is farthest")),
    )
    for y, name, words in rows:
        drawing.text(28, y + 26, name, size=16, bold=True)
        drawing.lines(28, y + 48, words, size=12.5, leading=17)
    for y in (104, 212, 326, 432):
        drawing.path([(28, y), (WIDTH - 28, y)], line="grid", stroke=1)
    _program(drawing, 20)
    _tiles(drawing, 112)
    _tasks(drawing, 220)
    _workers(drawing, 334)
    _memories(drawing, 440)
    return drawing.svg()


LEFT: Final = 290
"""Where the pictures of a row begin."""


def _program(drawing: Drawing, y: float) -> None:
    chips = (("loss = model(tokens, targets)", "blue", 252), ("loss.backward()", "orange", 140), ("optimizer.step()", "green", 148))
    x = float(LEFT)
    for number, (words, colour, width) in enumerate(chips):
        drawing.box(x, y + 20, width, 34, fill=f"{colour}-tint", line=colour, radius=5)
        drawing.text(x + width / 2, y + 42, words, size=13, anchor="middle", code=True)
        if number < 2:
            drawing.path([(x + width + 2, y + 37), (x + width + 9, y + 37)], line="muted", arrow=True)
        x += width + 11


def _grid(drawing: Drawing, x: float, y: float, columns: int, rows: int, colour: str, marked: tuple[int, int] | None, cell: float = 17) -> None:
    """A tensor of columns x rows tiles, at most one of them marked."""
    for row in range(rows):
        for column in range(columns):
            here = (column, row) == marked
            drawing.box(x + column * cell, y + row * cell, cell - 2, cell - 2, fill=colour if here else f"{colour}-tint", line=colour, radius=2)


def _tiles(drawing: Drawing, y: float) -> None:
    parts: tuple[tuple[str, int, int, str, tuple[int, int] | None], ...] = (
        ("x", 3, 4, "blue", (0, 1)),
        ("weight", 6, 3, "blue", (2, 0)),
        ("y", 6, 4, "blue", (2, 1)),
        ("gradient", 6, 3, "orange", None),
        ("moments", 6, 3, "green", None),
    )
    x = float(LEFT)
    for name, columns, rows, colour, marked in parts:
        _grid(drawing, x, y + 14, columns, rows, colour, marked)
        drawing.text(x + columns * 17 / 2 - 1, y + 92, name, size=12.5, anchor="middle", colour="muted")
        x += columns * 17 + 20
        if name in ("x", "weight"):
            drawing.text(x - 11, y + 46, {"x": "·", "weight": "="}[name], size=18, anchor="middle", colour="muted")


def _tasks(drawing: Drawing, y: float) -> None:
    colours = ("blue", "blue", "blue", "blue", "orange", "orange", "orange", "orange", "green")
    names = {0: "embedding", 1: "matmul", 2: "attention", 3: "loss", 4: "loss", 5: "attention", 6: "matmul", 7: "embedding", 8: "AdamW"}
    columns = [(LEFT + 24 + 64.0 * number, 3 if number not in (3, 4) else 2) for number in range(len(colours))]
    heights = {3: (y + 22, y + 48, y + 74), 2: (y + 35, y + 61)}
    for number in range(len(columns) - 1):
        (x, count), (following, after) = columns[number], columns[number + 1]
        for place, one in enumerate(heights[count]):
            for other, two in enumerate(heights[after]):
                if count != after or place == other or (place + 1 == other and number % 2 == 0):
                    drawing.path([(x + 10, one), (following - 10, two)], line="gray", stroke=1, arrow=True)
    for number, ((x, count), colour) in enumerate(zip(columns, colours, strict=True)):
        for place, height in enumerate(heights[count]):
            followed = names[number] == "matmul" and colour == "blue" and place == 1
            drawing.dot(x, height, 8.5, fill=colour if followed else f"{colour}-tint", line=colour)
        drawing.text(x, y + 99, names[number], size=11.5, anchor="middle", colour="muted")


def _workers(drawing: Drawing, y: float) -> None:
    lanes: tuple[tuple[str, tuple[tuple[str, float], ...]], ...] = (
        ("cpu:0", (("blue", 44), ("blue", 62), ("blue", 38), ("orange", 56), ("orange", 74), ("orange", 40), ("green", 52), ("green", 40))),
        ("cpu:1", (("blue", 58), ("blue", 40), ("orange", 50), ("orange", 44), ("orange", 70), ("orange", 58), ("green", 44), ("green", 42))),
        ("cuda:0", ()),
    )
    for number, (name, bars) in enumerate(lanes):
        top = y + 12 + 27 * number
        drawing.text(LEFT, top + 14, name, size=12.5, code=True)
        x = LEFT + 62.0
        for place, (colour, width) in enumerate(bars):
            drawing.box(x, top, width, 19, fill=colour if (number, place) == (0, 1) else f"{colour}-tint", line=colour, radius=2)
            x += width + 3
        if not bars:
            drawing.box(x, top, 427, 19, line="gray", radius=2, dashed=True)
            drawing.text(x + 213, top + 14, "the same tasks on a GPU: tested on emulated devices only", size=12, anchor="middle", colour="muted")
    drawing.path([(LEFT + 500, y + 31), (LEFT + 522, y + 31)], line="muted", arrow=True)
    drawing.text(LEFT + 528, y + 35, "time", size=12, colour="muted")


def _memories(drawing: Drawing, y: float) -> None:
    ram, disk, top, height = LEFT, LEFT + 300, y + 34, 62
    for x, width, name, flag in ((ram, 176, "RAM", "--ram"), (disk, 262, "disk", "--disk")):
        drawing.text(x, y + 24, name, size=13, bold=True)
        drawing.text(x + width, y + 24, flag, size=12, anchor="end", code=True, colour="muted")
        drawing.box(x, top, width, height, fill="panel", line="ink", radius=4, stroke=1.6)
    palette = {"b": "blue", "o": "orange", "g": "green"}
    for x, letters, columns in ((ram, "bBogBobbgoBb", 6), (disk, "ggbbooggbbggoobbgg", 9)):  # capitals: the tiles of the task that is followed
        for number, letter in enumerate(letters):
            colour = palette[letter.lower()]
            place = (x + 11 + 27 * (number % columns), top + 9 + 24 * (number // columns))
            drawing.box(*place, 20, 20, fill=colour if letter.isupper() else f"{colour}-tint", line=colour, radius=2)
    middle = (ram + 176 + disk) / 2
    drawing.path([(disk - 8, top + 18), (ram + 184, top + 18)], line="blue", stroke=1.8, arrow=True)
    drawing.text(middle, top + 11, "fetch ahead", size=12, anchor="middle")
    drawing.path([(ram + 184, top + 44), (disk - 8, top + 44)], line="orange", stroke=1.8, arrow=True)
    drawing.text(middle, top + 61, "write back, evict", size=12, anchor="middle")
    drawing.text(LEFT, y + 114, "Filled: one matmul and its three tiles. A GPU's memory is one more such box.", size=12, colour="muted")


def _bytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 10**9 else f"{count / 1e6:.0f} MB"


def _stamp(result: Mapping[str, Any]) -> str:
    return f"{result['date']}, commit {result['commit']}"
