"""Texts by quantised weights beside fp32 ones: tokens a second of one text, and resident memory, of the same random GPT-2.

    python benchmarks/quantised.py                # gpt2-medium; writes benchmarks/results/quantised.json
    python benchmarks/quantised.py --model tiny --rounds 1 --output=   # a quick look, written nowhere

The model directories are written first, into a temporary directory that takes 2.2 GB for gpt2-medium: as fp32, q8_0, and q4_0 whose token embedding,
the head, is q8_0. A side opens its directory, reads each weight from its place in the file when a task first wants it, writes a few tokens to warm
up, then `NEW` greedy tokens behind a prompt of `PROMPT`; tokens a second over all of that. Memory is the process's peak, interpreter included, as a
plain installation takes it: without SciPy (16 MB), which Numba imports where extras have brought it, and without durations that other programs have
left in the cache of this machine (up to 10 MB).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import common
import numpy as np

FP32: Final = "fp32"
SIDES: Final = (FP32, "q8_0", "q4_0")
PROMPT: Final = 32
NEW: Final = 128
WARMUP: Final = 8


def write_directories(folder: Path, preset: str) -> None:
    """The directories of all sides, of equal numbers; a tensor at a time is in memory, but for those of the file that is being written."""
    from safetensors.numpy import save_file

    from nntask import PRESETS
    from tiles import BLOCK_FORMATS, block_format

    config: Any = PRESETS[preset]
    for side in SIDES:
        target, rng, tensors, formats = folder / side, np.random.default_rng(0), dict[str, np.ndarray](), dict[str, str]()
        target.mkdir()
        for name, shape in shapes_of(config).items():
            values = np.full(shape, "ln_" in name and name.endswith("weight"), np.float32)
            if len(shape) == 2:
                values += np.float32(0.02) * rng.standard_normal(shape, np.float32)
            is_table = name in ("transformer.wte.weight", "transformer.wpe.weight")
            if side == FP32 or len(shape) == 1 or name == "transformer.wpe.weight":
                tensors[name] = values
                continue
            formats[name] = "q8_0" if is_table else side
            tensors[name] = block_format.encode(values if is_table else values.T, BLOCK_FORMATS[formats[name]])
        save_file(tensors, target / "model.safetensors", {"format": "pt", **({"quantised": json.dumps(formats)} if formats else {})})
        (target / "config.json").write_text(json.dumps(config.to_dict()))


def shapes_of(config: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a GPT-2 in transformers' files."""
    width, inner = config.n_embd, config.inner_size
    found: dict[str, tuple[int, ...]] = {"wte.weight": (config.vocab_size, width), "wpe.weight": (config.n_positions, width)}
    for layer in range(config.n_layer):
        for norm in ("ln_1", "ln_2"):
            found |= {f"h.{layer}.{norm}.{kind}": (width,) for kind in ("weight", "bias")}
        for name, pair in (
            ("attn.c_attn", (width, 3 * width)),
            ("attn.c_proj", (width, width)),
            ("mlp.c_fc", (width, inner)),
            ("mlp.c_proj", (inner, width)),
        ):
            found |= {f"h.{layer}.{name}.weight": pair, f"h.{layer}.{name}.bias": pair[1:]}
    found |= {f"ln_f.{kind}": (width,) for kind in ("weight", "bias")}
    return {f"transformer.{name}": shape for name, shape in found.items()}


def run(directory: Path, workers: int) -> dict[str, float]:
    """One side."""
    from nntask.inference import Generator, ModelSource, Sampling
    from nntask.tiling import generation_tiling
    from scheduler import Runtime

    source, greedy = ModelSource.open(directory), Sampling(temperature=0)
    config: Any = source.config
    prompt = [[int(i) for i in np.random.default_rng(0).integers(0, config.vocab_size, PROMPT)]]
    with Runtime(cpu_workers=workers) as runtime:
        tiling = generation_tiling(config, is_quantised=source.is_quantised)
        generator = Generator(source.build(runtime, tiling), runtime, config.n_positions)
        list(generator.stream(prompt, WARMUP, greedy))
        begin = perf_counter()
        count = sum(1 for _ in generator.stream(prompt, NEW, greedy))
        seconds = perf_counter() - begin
    assert count == NEW
    return {"tokens_per_second": NEW / seconds, "seconds": seconds}


def comparisons(preset: str, found: Mapping[str, common.Measurement]) -> list[dict[str, Any]]:
    """Each kind beside fp32."""
    rows, plain = [], found[FP32]
    for side in SIDES[1:]:
        what, bars = f"{preset}, {NEW} new tokens of one text, {side}", side == "q4_0"
        speeds = [each["tokens_per_second"] for each in (found[side], plain)]
        memory = [each["peak_rss_bytes"] for each in (found[side], plain)]
        rows.append(common.compare(what, "tokens/s", speeds[0], FP32, speeds[1], better="more", **({"bar": "ratio >= 2.0"} if bars else {})))
        name = f"{what}: peak resident memory"
        rows.append(common.compare(name, "bytes", memory[0], FP32, memory[1], better="less", **({"bar": "ratio <= 0.25"} if bars else {})))
    return rows


def main() -> None:
    parser = common.parser(__doc__, "quantised")
    parser.add_argument("--model", default="gpt2-medium", help="a preset of GPT-2")
    parser.add_argument("--rounds", type=int, default=3, help="times each side runs")
    parser.add_argument("--workers", type=int, default=common.usable_cores(), help="workers of each side")
    parser.add_argument("--folder", type=Path, help="where the directories are, or are written; a temporary one unless given")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        sys.modules["scipy"] = None  # type: ignore[assignment]  # as if it were not there
        common.report({**run(options.folder / options.side, options.workers), "peak_rss_bytes": common.peak_rss()})
        return
    machine = common.machine()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if not (folder / SIDES[-1] / "config.json").exists():
            write_directories(folder, options.model)
        again = [f"--folder={folder}", f"--workers={options.workers}"]
        environment = {**common.one_thread_blas(), "XDG_CACHE_HOME": str(Path(temporary) / "cache")}
        sides = [common.Side(name, common.this_script(__file__, f"--side={name}", *again), environment) for name in SIDES]
        rounds = common.alternate(sides, options.rounds)
    middle = {name: common.medians(measured) for name, measured in rounds.items()}
    common.finish(
        options.output,
        machine,
        ("nntask", "numpy", "numba"),
        {"model": options.model, "prompt": PROMPT, "new": NEW, "rounds": options.rounds, "workers": options.workers},
        comparisons(options.model, middle),
        keep=options.model == "gpt2-medium",
        medians=middle,
        rounds=rounds,
    )


if __name__ == "__main__":
    main()
