"""The page docs/results/gpu.md: claims for a card with their measurements, attention times of `make first-card`, expected times of kernels."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rows import table

FIRST_CARD: Final = Path(__file__).with_name("first_card_results")
"""Files of JSON lines, one for each stage of `make first-card`."""
CLAIMS: Final = (
    ("small", "GPT-2 small, bf16, 16 x 1024 tokens a step, tokens/s over torch.compile", "≥ 1, MFU ≥ 40 %"),
    ("xl", "GPT-2 XL, bf16, 16 x 1024 tokens a step, tokens/s over torch.compile", "≥ 1, MFU ≥ 50 %"),
    ("launch", "host time per replayed task", "≤ 8 us, ≤ 5 % of the step of GPT-2 small"),
    ("beyond", "GPT-2 XL with a quarter of the memory it needs, 32 x 1024 tokens a step, over the rate in memory", "≥ 0.8, losses equal"),
    ("reach", "trains with a state 7 x its budget", "yes"),
    ("offload", "tokens/s at the same budget over torch FSDP2 with CPU offload", "≥ 1"),
    ("copies", "bytes/s of tiles to the card and back over those of one large locked copy", "≥ 0.85 each"),
    ("parts", "two parts of one card: losses of one within rounding, both busy", "yes"),
    ("numerics", "bf16 loss against fp32 after 200 steps", "within 1 %"),
)
"""Name of a row of results.json, the claim, and its bar."""
PAGE: Final = """# GPUs

Claims for one card, measured by `make bench-gpu`. Each training is `nntask train` in a process of its own on random tokens, and counts the median of
its steps after the first four. torch runs the hand-written GPT-2 of `benchmarks/torch_gpt2.py` on the same card with `torch.compile`, and under FSDP2
with everything in host memory. MFU: model flops, 6N + 12Ldn a token, over the card's dense bf16 peak.

{claims}

{stamp}
"""
ATTENTION: Final = """
## Attention

Milliseconds of the forward and backward pass of causal bf16 attention, 8 sequences with 12 heads, by `make first-card`. nntask's kernels compute the
shapes that cuDNN declines because it has no backward pass within 320 MiB of workspace.

{times}

`--attention auto` chose {chosen} for GPT-2 small, which then trained at {rate:,} tokens/s.

`benchmarks/gpu/first_card_results` has the result of every check of `make first-card`: see
[what a card has shown](../guides/gpus.md#what-a-card-has-shown).
"""


EXPECTED: Final = """
## Expected, not measured

`benchmarks/gpu/model.py` bounds the time of each launch of a recorded step by its bytes, its flops and its instructions in machine code, here for an
H100: 3.0 TB/s, 800 Tflop/s, 2 µs a launch.

{times}

Expected MFU: {small:.0%} for GPT-2 small and {xl:.0%} for XL; the bars are 40% and 50%. Expected rate of GPT-2 small on an H200: {rate:,.0f}
tokens/s. The kernels that were measured there had {over:.2f} of their expected rate. Of {count} measured alone, the middle half took {low:.2f} to
{high:.2f} x of the expected time, and `{worst}` {most:.1f} x; some of these kernels have changed since.
"""
MODEL: Final = Path(__file__).with_name("model.json")
SHOWN: Final = 0.015
"""Smallest share of a step's time with which a kernel is on the page."""


def claims(results: Mapping[str, Any]) -> str:
    """Return the table of claims with their bars and measurements."""
    lines = []
    for name, claim, bar in CLAIMS:
        row = results.get("rows", {}).get(name) or {}
        verdict = {True: "met", False: "**not met**", None: "no verdict"}[row.get("met")]
        measured = "not measured yet" if row.get("measured") is None else f"{row['measured']}: {verdict}"
        lines.append([claim, bar, measured, f"{row['date']}, {row['commit']}" if "date" in row else ""])
    return table(["claim", "bar", "measured", "date, commit"], lines)


def attention() -> str:
    """Return the attention times of the stage `profile` of `make first-card`, with the rate of a run that chose between the kernels."""
    lines = (json.loads(line) for line in (FIRST_CARD / "profile.jsonl").read_text().splitlines())
    found = {line["check"]: line["result"] for line in lines if line["command"] == "attention" and "result" in line}
    choice = found.pop(next(name for name in found if name.startswith("the choice of ")))
    cells = []
    for shape, times in found.items():
        pairs = [[times.get(f"{name}{way}", "").removesuffix(" ms") for way in ("forward", "backward")] for name in ("", "cuDNN ", "torch ")]
        cells.append([shape, *(" / ".join(pair) if all(pair) else "declined" for pair in pairs)])
    times = table(["tokens x features of a head", "nntask", "cuDNN", "torch"], cells)
    return ATTENTION.format(times=times, chosen=choice["chosen"], rate=choice["tokens/s"])


def expected(results: Mapping[str, Any]) -> str:
    """Return the kernels' expected times by `model.json`, and how far the model is from what a card has measured."""
    model = json.loads(MODEL.read_text())
    steps = list(model["steps"].values())
    total = [step["cards"]["H100"] for step in steps]
    names = [name for name in steps[1]["kernels"] if any(_share(step, name) > SHOWN for step in steps)]
    cells = [[name, *(cell for step in steps for cell in _cells(step["kernels"].get(name)))] for name in names]
    sums = [{**card, "launches": step["launches"], "bound": ""} for step, card in zip(steps, total, strict=True)]
    cells.append(["all", *(cell for row in sums for cell in _cells(row))])
    head = ["kernel", *(word.format(name) for name in ("small", "XL") for word in ("{}: launches", "least ms", "expected ms", "bound"))]
    compared = model["calibration"]
    rows = sorted(compared["kernels"], key=lambda row: row["measured_us"] / row["expected_us"])
    ratios = [row["measured_us"] / row["expected_us"] for row in rows]
    return EXPECTED.format(
        times=table(head, cells),
        small=total[0]["mfu"],
        xl=total[1]["mfu"],
        rate=steps[0]["cards"]["H200"]["tokens_per_second"],
        over=results["rows"]["small"]["ours"]["tokens_per_second"] / compared["tokens_per_second"],
        count=len(rows),
        low=ratios[len(rows) // 4],
        high=ratios[-len(rows) // 4],
        worst=rows[-1]["kernel"],
        most=ratios[-1],
    )


def _share(step: Mapping[str, Any], name: str) -> float:
    """Return a kernel's share of the expected time of a step."""
    return float(step["kernels"].get(name, {}).get("expected_ms", 0) / step["cards"]["H100"]["expected_ms"])


def _cells(row: Mapping[str, Any] | None) -> list[str]:
    """Return the cells of a kernel in a step."""
    return ["", "", "", ""] if row is None else [f"{row['launches']}", f"{row['lower_ms']:.2f}", f"{row['expected_ms']:.2f}", row["bound"]]


def page(results: Mapping[str, Any]) -> str:
    """Return the text of docs/results/gpu.md."""
    stamp = "No rows have been measured on a card yet. Emulated devices, on which GPU code is tested, say nothing about speed."
    if results.get("rows"):
        versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
        stamp = f"{results['gpu']}; {versions}. `benchmarks/gpu/results.json` has every figure."
    more = attention() + expected(results) if (FIRST_CARD / "profile.jsonl").exists() and results.get("rows") else ""
    return PAGE.format(claims=claims(results), stamp=stamp) + more
