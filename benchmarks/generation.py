"""Texts by GPT-2 small beside transformers' generate on torch: fp32, one text, greedy, random weights, keys and values cached.

    python benchmarks/generation.py                # 128 new tokens; writes benchmarks/results/generation.json
    python benchmarks/generation.py --case long    # to position 1000, time per token early and late; benchmarks/results/generation_long.json
    python benchmarks/generation.py --case mixture # 64 experts, 8 per token, beside a dense model of the active size; generation_mixture.json
    python benchmarks/generation.py --rounds 1 --output=   # a quick look, written nowhere

A measurement is: build, write a few tokens to warm up, then write `NEW` tokens behind a prompt of `PROMPT`; tokens per second over all of that, the
prompt's pass included. In the long case the text goes on until the context is full, and the seconds between its tokens are kept: the median of
those around positions 64 and 960, and the mean over all between them, in which recording a step anew for each tile of the cache counts, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from time import perf_counter
from typing import Any, Final

import common
import numpy as np

OURS: Final = "ours"
TORCH: Final = "transformers' generate"
DENSE: Final = "dense model of the active size"
CASES: Final = {"128": (OURS, TORCH), "long": (OURS,), "mixture": (OURS, DENSE), "tiny": (OURS, TORCH)}
"""Name of the case -> sides."""
PROMPT: Final = 32
NEW: Final = 128
WARMUP: Final = 8
EARLY, LATE, AROUND = 64, 960, 16
"""Positions that the long case compares, and how many tokens on either side of them count."""


INNER, EXPERTS, CHOSEN = 512, 64, 8
"""Width inside an expert, number of experts, and number of experts per token in the mixture, which has 4 layers of 1024 features."""


def config_of(case: str, side: str = OURS) -> Any:
    """The preset's config; in the mixture's case that of a Mixtral, or of a LLaMA whose feed-forward layers are as wide as the chosen experts."""
    from nntask import PRESETS
    from nntask.models import FAMILIES

    if case == "mixture":
        if side == DENSE:
            return FAMILIES["llama"].config.of_size(2048, 1024, INNER * CHOSEN, 4, 8, 512)
        mixture = FAMILIES["mixtral"].config
        return mixture.of_size(2048, 1024, INNER, 4, 8, 512, num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN)
    return PRESETS["tiny" if case == "tiny" else "gpt2"]


def prompt_of(vocab: int) -> list[int]:
    """The same for every side."""
    return [int(i) for i in np.random.default_rng(0).integers(0, vocab, PROMPT)]


def run_ours(case: str, workers: int, side: str) -> dict[str, float]:
    """Our side, and the dense model of the mixture's case."""
    from nntask.inference import Generator, Sampling
    from nntask.models import build
    from nntask.tiling import generation_tiling
    from scheduler import Runtime

    config, greedy = config_of(case, side), Sampling(temperature=0)
    prompt = [prompt_of(config.vocab_size)]
    with Runtime(cpu_workers=workers) as runtime:
        generator = Generator(build(config, generation_tiling(config), runtime, seed=0), runtime, config.n_positions)
        list(generator.stream(prompt, WARMUP, greedy))
        count = config.n_positions - PROMPT if case == "long" else NEW
        begin = perf_counter()
        times = np.array([perf_counter() for _ in generator.stream(prompt, count, greedy)])
        seconds = times[-1] - begin
    found = {"tokens_per_second": count / seconds, "seconds": seconds}
    if case == "long":
        gaps = np.diff(times)  # gaps[i] ends with the token at position PROMPT + 1 + i

        def around(position: int) -> float:
            return float(np.median(gaps[position - AROUND - PROMPT - 1 : position + AROUND - PROMPT - 1]))

        found |= {
            "seconds_early": around(EARLY),
            "seconds_late": around(LATE),
            "seconds_mean": float(gaps[EARLY - PROMPT - 1 : LATE - PROMPT].mean()),
        }
    return found


def run_torch(case: str, workers: int) -> dict[str, float]:
    """The peer: GPT2LMHeadModel with the settings it comes with."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.set_num_threads(workers)
    config = config_of(case)
    keys = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
    model = GPT2LMHeadModel(GPT2Config(**{key: getattr(config, key) for key in keys}, bos_token_id=None, eos_token_id=None)).eval()
    prompt = torch.tensor([prompt_of(config.vocab_size)])
    given = {"do_sample": False, "attention_mask": torch.ones_like(prompt), "pad_token_id": 0}
    model.generate(prompt, max_new_tokens=WARMUP, **given)
    begin = perf_counter()
    found = model.generate(prompt, max_new_tokens=NEW, **given)
    seconds = perf_counter() - begin
    assert found.shape[1] == PROMPT + NEW
    return {"tokens_per_second": NEW / seconds, "seconds": seconds}


def comparisons(case: str, found: Mapping[str, common.Measurement], rounds: Mapping[str, list[common.Measurement]]) -> list[dict[str, Any]]:
    """Speed beside the peer; early beside late tokens. A mixture's ratio is not resolved if rounds lie on both sides of the bar."""
    ours = found[OURS]
    if case == "long":
        what, early = "gpt2, one text, fp32: seconds of a token", f"around position {EARLY}"
        return [
            common.compare(
                f"{what} around position {LATE}", "s", ours["seconds_late"], early, ours["seconds_early"], better="less", bar="ratio <= 1.2"
            ),
            common.compare(f"{what}, mean of {EARLY} to {LATE}", "s", ours["seconds_mean"], early, ours["seconds_early"], better="less"),
        ]
    if case == "mixture":
        what = f"{EXPERTS} experts, {CHOSEN} per token, 4 layers of 1024, {NEW} new tokens of one text, fp32"
        speeds = [found[side]["tokens_per_second"] for side in (OURS, DENSE)]
        row = common.compare(what, "tokens/s", speeds[0], DENSE, speeds[1], better="more", bar="ratio >= 0.9")
        ratios = [ours["tokens_per_second"] / theirs["tokens_per_second"] for ours, theirs in zip(rounds[OURS], rounds[DENSE], strict=True)]
        return [row | {"verdict": "not resolved"} if min(ratios) < 0.9 <= max(ratios) else row]
    what = f"gpt2, {NEW} new tokens of one text, fp32"
    speeds = [found[side]["tokens_per_second"] for side in (OURS, TORCH)]
    memory = [found[side]["peak_rss_bytes"] for side in (OURS, TORCH)]
    return [
        common.compare(what, "tokens/s", speeds[0], f"torch, {TORCH}", speeds[1], better="more", bar="ratio >= 1.0"),
        common.compare(f"{what}: peak resident memory", "bytes", memory[0], f"torch, {TORCH}", memory[1], better="less"),
    ]


def main() -> None:
    parser = common.parser(__doc__, None)
    parser.add_argument("--case", default="128", choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=3, help="times each side runs")
    parser.add_argument("--workers", type=int, default=common.usable_cores(), help="threads of each side")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        found = run_torch(options.case, options.workers) if options.side == TORCH else run_ours(options.case, options.workers, options.side)
        common.report({**found, "peak_rss_bytes": common.peak_rss()})
        return
    again = [f"--case={options.case}", f"--workers={options.workers}"]
    sides = [
        common.Side(
            name, common.this_script(__file__, f"--side={name}", *again), _threads(options.workers) if name == TORCH else common.one_thread_blas()
        )
        for name in CASES[options.case]
    ]
    machine, rounds, middle = common.measured(sides, options.rounds)
    output = (f"generation_{options.case}" if options.case in ("long", "mixture") else "generation") if options.output is None else options.output
    common.finish(
        output,
        machine,
        ("nntask", "numpy", "torch", "transformers"),
        {"prompt": PROMPT, "new": NEW, "rounds": options.rounds, "workers": options.workers},
        comparisons(options.case, middle, rounds),
        keep=options.case != "tiny",
        medians=middle,
        rounds=rounds,
    )


def _threads(workers: int) -> dict[str, str]:
    """Environment in which torch may use `workers` threads."""
    return {name: str(workers) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}


if __name__ == "__main__":
    main()
