"""Training steps of GPT-2 beside PyTorch as users run it, and beside PyTorch at its best: fp32, AdamW, dropout 0, random tokens.

    python benchmarks/training.py                                # GPT-2 small, 4 x 1024 tokens; writes benchmarks/results/training.json
    python benchmarks/training.py --case 1x1024                  # one sequence a step; benchmarks/results/training_1x1024.json
    python benchmarks/training.py --case medium                  # gpt2-medium, 2 x 1024; benchmarks/results/training_medium.json
    python benchmarks/training.py --rounds 1 --steps 1 --output= # a quick look, written nowhere

A measurement is: build, warm-up steps, then `--steps` timed steps; tokens per second over the timed ones, and the process's peak resident memory
over everything. Peers are two models (transformers' GPT2LMHeadModel with sdpa attention, and the quicker hand-written one of `torch_gpt2`), eager or
behind torch.compile, with fused AdamW, with malloc as it is or told to keep freed buffers ("kept"). All of them run once in a scouting round; those
that bars are about, and the fastest of all, then alternate with ours for `--rounds` rounds. The rate of sgemm on all workers at once is measured in
every round as well and counted in tokens: model flops are 6N + 12Ldn per token, N without positions (`nntask.hardware.flops`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import common
import steps as steps_of

LENGTH: Final = 1024
KEEP: Final = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(10**12)}
OURS: Final = "ours"
PEAK: Final = "sgemm peak"
EAGER: Final = "transformers, eager"
COMPILED: Final = "transformers, compiled"
PEERS: Final = tuple(
    f"{model}, {mode}{kept}" for model in ("transformers", "hand-written") for mode in ("eager", "compiled") for kept in ("", ", kept")
)
PEAK_TRIES: Final = 8

Step = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class Case:
    """What is trained, and what was promised.

    Args:
        bars: least ratio to eager torch, to compiled torch (both with default settings), to the fastest torch, and to the sgemm peak.
    """

    preset: str
    batch: int
    output: str
    bars: tuple[float, float, float, float]


CASES: Final = {
    "4x1024": Case("gpt2", 4, "training", (1.6, 1.2, 1.1, 0.88)),
    "1x1024": Case("gpt2", 1, "training_1x1024", (1.4, 1.1, 1.0, 0.0)),
    "medium": Case("gpt2-medium", 2, "training_medium", (1.6, 1.2, 1.1, 0.88)),
    "tiny": Case("tiny", 2, "", (0.0, 0.0, 0.0, 0.0)),
}
MOST_MEMORY: Final = 0.5
"""Peak resident memory of ours over that of eager torch, at most."""


def sizes_of(case: Case) -> Any:
    """The preset's config without dropout."""
    from dataclasses import replace

    from nntask import PRESETS

    return replace(PRESETS[case.preset], resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def measure(side: str, case: Case, warmup: int, steps: int, workers: int) -> dict[str, float]:
    """Run one side in this process."""
    config = sizes_of(case)
    length = min(LENGTH, config.n_positions)
    if side == PEAK:
        return {"tokens_per_second": peak_tokens(config, length, workers)}
    data = steps_of.batches(config.vocab_size, case.batch, length, warmup + steps)
    seconds, loss = steps_of.run_ours(config, data, warmup, workers) if side == OURS else run_torch(side, config, data, warmup, workers)
    return steps_of.figures(seconds, loss, steps, case.batch * length)


def peak_tokens(config: Any, length: int, workers: int) -> float:
    """Tokens per second that sgemm on every worker at once would allow, the best of a few tries."""
    from nntask.hardware import gemm_peak

    return max(gemm_peak(workers) for _ in range(PEAK_TRIES)) / (common.model_flops(config, length) / length)


def run_torch(side: str, config: Any, data: list[tuple[Any, Any]], warmup: int, workers: int) -> tuple[float, float]:
    """Return the seconds of the timed steps of a peer, and its last loss."""
    import torch

    torch.set_num_threads(workers)
    torch.manual_seed(0)
    model, parameters = transformers_model(config) if side.startswith("transformers") else hand_written_model(config)
    return steps_of.run_torch(torch.compile(model) if "compiled" in side else model, parameters, data, warmup)


def transformers_model(config: Any) -> tuple[Any, Any]:
    """Loss of tokens and targets by the library's model, and its parameters."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    keys = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "resid_pdrop", "embd_pdrop", "attn_pdrop")
    library = GPT2LMHeadModel(GPT2Config(**{key: getattr(config, key) for key in keys}, use_cache=False, attn_implementation="sdpa")).train()

    def model(tokens: Any, targets: Any) -> Any:
        return torch.nn.functional.cross_entropy(library(tokens).logits.flatten(0, 1), targets.flatten())

    return model, library.parameters()


def hand_written_model(config: Any) -> tuple[Any, Any]:
    """The same by the model of `torch_gpt2`."""
    from torch_gpt2 import GPT2

    model = GPT2(config.vocab_size, config.n_positions, config.n_embd, config.n_layer, config.n_head).train()
    return model, model.parameters()


def comparisons(case: Case, found: Mapping[str, common.Measurement], fastest: str) -> list[dict[str, Any]]:
    """Ours beside the judged peers: speed, memory, and how near it is to the machine's matrix peak."""
    what = f"{case.preset}, {case.batch} x 1024 tokens a step, fp32"
    speed = {side: one["tokens_per_second"] for side, one in found.items()}
    judged = dict(zip((EAGER, COMPILED, fastest, PEAK), case.bars, strict=True))
    if fastest in (EAGER, COMPILED):  # then one row carries the harder of the two bars
        judged[fastest] = max(case.bars[2], case.bars[(EAGER, COMPILED).index(fastest)])
    rows = []
    for peer in found:
        if peer == OURS:
            continue
        bar = f"ratio >= {judged[peer]:g}" if judged.get(peer) else ""
        name = peer if peer == PEAK else f"torch, {peer}" + (" (the fastest)" if peer == fastest else "")
        rows.append(common.compare(what, "tokens/s", speed[OURS], name, speed[peer], better="more", bar=bar))
    memory = {side: one["peak_rss_bytes"] for side, one in found.items() if side != PEAK}
    for peer, bar in ((EAGER, f"ratio <= {MOST_MEMORY:g}"), (fastest, "")):
        rows.append(common.compare(f"{what}: peak resident memory", "bytes", memory[OURS], f"torch, {peer}", memory[peer], better="less", bar=bar))
    return rows


def sides_of(names: list[str], options: argparse.Namespace) -> list[common.Side]:
    """Commands that measure in processes of their own."""
    again = [f"--{name}={getattr(options, name)}" for name in ("case", "warmup", "steps", "workers")]
    return [
        common.Side(
            name,
            common.this_script(__file__, f"--side={name}", *again),
            {**(common.one_thread_blas() if name in (OURS, PEAK) else {}), **(KEEP if name.endswith("kept") else {})},
        )
        for name in names
    ]


def main() -> None:
    parser = common.parser(__doc__, None)
    parser.add_argument("--case", default="4x1024", choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=5, help="times each judged side runs")
    parser.add_argument("--warmup", type=int, default=2, help="untimed steps of a run")
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a run")
    parser.add_argument("--workers", type=int, default=common.usable_cores(), help="threads of each side")
    parser.add_argument("--fastest", default="", choices=["", *PEERS], help="which peer is the fastest; without it, a scouting round finds out")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    case = CASES[options.case]
    if options.side:
        common.report(measure(options.side, case, options.warmup, options.steps, options.workers))
        return
    machine = common.machine()
    scouted: dict[str, list[common.Measurement]] = {}
    if not options.fastest:
        scouted = common.alternate(sides_of(list(PEERS), options), 1)
    fastest = options.fastest or max(scouted, key=lambda name: scouted[name][0]["tokens_per_second"])
    names = list(dict.fromkeys([OURS, PEAK, EAGER, COMPILED, fastest]))
    rounds = common.alternate(sides_of(names, options), options.rounds)
    middle = {name: common.medians(measured) for name, measured in rounds.items()}
    settings = {"batch": case.batch, "length": LENGTH} | {n: getattr(options, n) for n in ("rounds", "warmup", "steps", "workers")}
    output = case.output if options.output is None else options.output
    common.finish(
        output,
        machine,
        ("nntask", "numpy", "torch", "transformers"),
        settings,
        comparisons(case, middle, fastest),
        keep=options.case != "tiny",
        medians=middle,
        scouting=scouted,
        rounds=rounds,
    )


if __name__ == "__main__":
    main()
