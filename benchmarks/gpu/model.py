"""A model of the time of a training step on a GPU, from its launches and their machine code: expected, not measured.

    python benchmarks/gpu/model.py                     # prints tables and writes benchmarks/gpu/model.json; needs the NVRTC of the tests

A launch takes at least the longest of three times: its bytes at the memory's speed, its flops at the speed of tensor cores, and its instructions at
the speed at which schedulers issue them. The expected time adds the time between two launches. A product does not hide its accesses after its sums.
Products have one rate whatever their shape; no card has timed those of the head, which sum over 50,257 columns in rows that begin at multiples of
32 bytes. The model has no term for waiting: blocks that wait for one number after another take longer. With `--calibrate` the model for an H200 is
compared with the times of single kernels that `make first-card` has measured there, perhaps from other sources.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common
import kernel_speed
from launches import Launch, RecordingGpu, recording, step_launches
from machine_code import Loop, path_of
from machine_code import Path as CodePath

from tiles.kernels import source_text

RESULTS: Final = Path(__file__).with_name("model.json")
PROFILE: Final = Path(__file__).with_name("first_card_results") / "profile.jsonl"
STEPS: Final = {"GPT-2 small, 16 x 1,024": ("gpt2", 16), "GPT-2 XL, 8 x 1,024": ("gpt2-xl", 8)}
"""Preset and number of sequences of each step."""
PROFILED: Final = {"GPT-2 small, 16 x 1024": (16, 12), "GPT-2 XL, 4 x 1024": (4, 25)}
"""Sequences of 1,024 tokens and heads of each check of `kernel_speed`."""
PEAK: Final = 989e12
"""Dense bf16 flops a second by the datasheets of both cards, for the MFU."""
FLOPS_OF_PRODUCT: Final = 4096
"""Operations of a tensor-core instruction of 16 x 8 x 16."""


class Card(NamedTuple):
    """Speeds of a card.

    Attributes:
        memory: bytes a second, 0.9 of the datasheet.
        tensor: flops a second of large bf16 products.
        launch: seconds between two kernels of a graph.
        instructions: instructions of warps a second: 4 schedulers on each of 132 multiprocessors, 1.7 GHz.
    """

    memory: float
    tensor: float
    launch: float
    instructions: float = 132 * 4 * 1.7e9


CARDS: Final = {"H100": Card(3.0e12, 800e12, 2e-6), "H200": Card(4.3e12, 800e12, 1e-6)}


SUMS: Final = ("launches", "nbytes", "flops", "instructions", "lower_ms", "expected_ms")
"""Figures of a kernel in a step."""


class Time(NamedTuple):
    """Seconds of a launch: the lower bound, the resource that sets it, and the expected time."""

    lower: float
    bound: str
    expected: float


def digest_of_sources() -> str:
    """Return a hash of all kernel sources that a step launches."""
    return sha256("\0".join(source_text(name) for name in ("elementwise", "norm", "tables", "attention", "updates", "flash")).encode()).hexdigest()


@cache
def paths(source: str) -> Mapping[str, CodePath]:
    """Return the path through each bf16 kernel of a source on sm_90, where activations are the GELU of GPT-2."""
    from support.nvrtc import machine_code

    text = re.sub(r"(KERNEL \w+\([^)]*)\bint kind\b([^)]*\) \{)", r"\1int unused\2 const int kind = GELU_NEW;", source_text(source))
    return {kernel: path_of(code) for kernel, code in machine_code(source, "bf16", 90, text).items()}


def num_instructions(launch: Launch) -> float:
    """Return the number of instructions of all warps; 0 for products, whose code is cuBLAS's.

    The loop that accesses the most bytes runs until all bytes have been accessed, others once. If blocks have whole rows, loops over a row and over
    rows are known. Attention has the instructions per tensor-core operation of its whole code without a loop of `launch.turns` iterations.
    """
    if not launch.source:
        return 0.0
    path, warps = paths(launch.source)[launch.kernel], launch.blocks * launch.threads / 32
    if launch.flops:
        apart = sum(loop.instructions for loop in path.loops if not loop.has_products) if launch.turns else 0
        return launch.flops / FLOPS_OF_PRODUCT * (path.static - apart) / path.products + warps * launch.turns * apart
    if launch.rows:
        return warps * (path.straight + sum(_of_rows(loop, launch) for loop in path.loops))
    main = max(path.loops, key=lambda loop: loop.nbytes, default=None)
    others = path.straight + sum(loop.instructions for loop in path.loops if loop is not main)
    return warps * (others + (0 if main is None else main.instructions * max(1.0, launch.nbytes / warps / 32 / main.nbytes)))


def _of_rows(loop: Loop, launch: Launch) -> float:
    """Return the instructions of a loop over a row, or over rows if it has inner loops."""
    if not loop.inner:
        return loop.instructions * launch.turns
    return launch.rows * (loop.instructions + sum(_of_rows(inner, launch) for inner in loop.inner))


def time_of(launch: Launch, card: Card, instructions: float) -> Time:
    """Return the time of a launch on a card."""
    times = {
        "memory": launch.nbytes / card.memory,
        "tensor cores": launch.flops / card.tensor,
        "instructions": instructions / card.instructions,
    }
    bound = max(times, key=times.__getitem__)
    return Time(times[bound], bound, card.launch + times[bound] + (launch.exposed / card.memory if bound == "tensor cores" else 0.0))


def summary(launches: Sequence[Launch], card: Card) -> dict[str, dict[str, Any]]:
    """Return launches, bytes, flops, instructions and milliseconds by kernel, the largest expected time first."""
    rows: dict[str, dict[str, Any]] = {}
    for launch in launches:
        instructions = num_instructions(launch)
        time = time_of(launch, card, instructions)
        row = rows.setdefault(launch.kernel, dict.fromkeys(SUMS, 0) | {"bounds": {}})
        added = (1, launch.nbytes, launch.flops, instructions, 1e3 * time.lower, 1e3 * time.expected)
        for name, value in zip(row, added, strict=False):
            row[name] += value
        row["bounds"][time.bound] = row["bounds"].get(time.bound, 0.0) + time.lower
    for row in rows.values():
        bounds = row.pop("bounds")
        row |= {"bound": max(bounds, key=bounds.__getitem__)}
        row |= {name: round(row[name], 4) for name in ("lower_ms", "expected_ms")} | {name: int(row[name]) for name in ("flops", "instructions")}
    return dict(sorted(rows.items(), key=lambda pair: -pair[1]["expected_ms"]))


def step(preset: str, batch: int) -> dict[str, Any]:
    """Return the model of a step: by kernel on an H100, and in all on both cards."""
    from nntask import PRESETS

    launches = step_launches(preset, batch)
    flops, tokens = common.model_flops(PRESETS[preset], 1024) * batch, 1024 * batch
    result: dict[str, Any] = {"launches": len(launches), "tokens": tokens, "cards": {}, "kernels": summary(launches, CARDS["H100"])}
    for name, card in CARDS.items():
        rows = summary(launches, card)
        lower, expected = (1e-3 * sum(row[key] for row in rows.values()) for key in ("lower_ms", "expected_ms"))
        shown = {"lower_ms": 1e3 * lower, "expected_ms": 1e3 * expected, "tokens_per_second": tokens / expected, "mfu": flops / expected / PEAK}
        result["cards"][name] = {key: round(value, 3) for key, value in shown.items()}
    return result


def calibration() -> dict[str, Any]:
    """Return the kernels that an H200 has run one at a time, with measured and expected microseconds, and its expected rate of GPT-2 small."""
    lines = [json.loads(line) for line in PROFILE.read_text().splitlines()]
    measured = {line["check"]: line["result"] for line in lines if line["command"] == "kernel_speed" and "result" in line}
    rows = []
    for check, (batch, heads) in PROFILED.items():
        gpu = RecordingGpu(1 << 41)
        bench = kernel_speed.Bench(gpu)
        with recording(gpu) as launches:
            for name, call, _, _ in kernel_speed.rows(bench, batch, 1024, heads, 50257):
                if name not in measured[check]:
                    continue
                launches.clear()
                call()
                expected = sum(time_of(launch, CARDS["H200"], num_instructions(launch)).expected for launch in launches)
                seconds = float(measured[check][name].split()[0]) * 1e-6
                rows.append({"step": check, "kernel": name, "measured_us": round(1e6 * seconds, 1), "expected_us": round(1e6 * expected, 1)})
    return {"tokens_per_second": step("gpt2", 16)["cards"]["H200"]["tokens_per_second"], "kernels": rows}


def printed(title: str, found: Mapping[str, Any]) -> str:
    """Return the model of a step as lines of text."""
    lines = [f"{title}: {found['launches']} launches"]
    lines += [f"  {name}: " + ", ".join(f"{key} {value:,}" for key, value in card.items()) for name, card in found["cards"].items()]
    for kernel, row in found["kernels"].items():
        figures = f"{row['nbytes'] / 1e9:9.3f} GB {row['flops'] / 1e12:9.3f} Tflop {row['instructions'] / 1e9:8.3f} G instructions"
        lines.append(f"  {kernel:26}{row['launches']:5} {figures} {row['lower_ms']:8.3f} to {row['expected_ms']:8.3f} ms, {row['bound']}")
    return "\n".join(lines)


def main() -> None:
    """Print the tables, and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--calibrate", action="store_true", help="compare with the kernels that first_card_results has")
    options = parser.parse_args()
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    compared = calibration() if options.calibrate else before["calibration"]
    results = {"sources": digest_of_sources(), "steps": {title: step(*asked) for title, asked in STEPS.items()}, "calibration": compared}
    print("\n\n".join(printed(title, found) for title, found in results["steps"].items()))
    print("\nH200, one kernel at a time: measured and expected us")
    for row in compared["kernels"]:
        print(f"  {row['step']:24}{row['kernel']:22}{row['measured_us']:9} {row['expected_us']:9} {row['expected_us'] / row['measured_us']:6.2f}")
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
