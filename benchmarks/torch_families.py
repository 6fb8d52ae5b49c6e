"""Families of transformers through `wrappers.torch.Session`: each one's losses beside PyTorch's own, and its bits under every budget and worker.

    python benchmarks/torch_families.py                                           # writes benchmarks/results/torch_families.json
    python benchmarks/torch_families.py --families gpt2 t5 --steps 3 --output=    # a quick look, written nowhere

The families are those of `tests/support/torch_families.py`: two layers each, dropout off, random batches from a seed. A family takes its steps of
AdamW in PyTorch (eager, two minibatches accumulated) and then in four sessions from the same first weights: in memory on two workers; with a quarter
of the memory that this took and a disk below it; on one worker; on two simulated devices. The loss of every step is compared with PyTorch's, and the
losses and last weights of the other three sessions with those of the first, bit by bit. Nothing here is timed, so all of it runs in one process.

Bars: at least 20 families; the largest difference of a loss at most 1e-5; the same bits in all sessions; peaks within the budgets.
"""

from __future__ import annotations

import copy
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, Final

import common

sys.path.insert(0, str(common.ROOT / "tests"))  # torch_families imports nothing of tests

MINIBATCHES: Final = 2
RATE: Final = 1e-3
ENOUGH: Final = 20
NEAR: Final = 1e-5
QUARTER: Final = "a quarter of the memory, disk"


def eager(module: Any, batches: Sequence[Mapping[str, Any]]) -> list[float]:
    """Losses of PyTorch, which is what a session is held against."""
    import torch

    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        found = []
        for number in range(MINIBATCHES):
            part = {name: value.chunk(MINIBATCHES)[number] if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
            loss = module(**part).loss
            (loss / MINIBATCHES).backward()
            found.append(loss.item())
        optimizer.step()
        losses.append(sum(found) / MINIBATCHES)
    return losses


def train(module: Any, batches: Sequence[Mapping[str, Any]], **terms: Any) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    """Losses, last weights and counters of a session over a copy of the module."""
    from wrappers.torch import Session

    with Session(copy.deepcopy(module), lr=RATE, minibatches=MINIBATCHES, **terms) as session:
        losses = [session.step(**batch) for batch in batches]
        return losses, session.state_dict(), session.runtime.stats()


def measure(family: str, steps: int) -> dict[str, Any]:
    """One family: differences of losses, which sessions had the same bits, bytes."""
    import torch
    from support.torch_families import make

    module, batches = make(family, steps)
    expected = eager(copy.deepcopy(module), batches)
    losses, weights, stats = train(module, batches, ram="256MB", workers=2)
    needed = stats["peak_bytes"]["ram"]
    with tempfile.TemporaryDirectory() as disk:
        others = {
            QUARTER: {"ram": f"{needed // 4}B", "disk": f"{disk}:256MB", "workers": 2},
            "one worker": {"ram": "256MB", "workers": 1},
            "two simulated devices": {"ram": "256MB", "workers": 0, "sim_gpu": 2, "gpu_memory": "64MB"},
        }
        found = {name: train(module, batches, **terms) for name, terms in others.items()}
    quarter = found[QUARTER][2]
    return {
        "model": type(module).__name__,
        "eager_losses": expected,
        "losses": losses,
        "difference": max(abs(ours - theirs) for ours, theirs in zip(losses, expected, strict=True)),
        "same_bits": {
            name: other == losses and all(torch.equal(state[key], value) for key, value in weights.items())
            for name, (other, state, _) in found.items()
        },
        "peak_bytes": needed,
        "quarter_budget_bytes": needed // 4,
        "quarter_peak_bytes": quarter["peak_bytes"]["ram"],
        "quarter_moved_bytes": sum(quarter["moved_bytes"].values()),
    }


def comparisons(found: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each family, and what holds for all of them, which is what has bars: one promise counts once, not once for each family."""
    rows = [common.compare(f"{name}, `{each['model']}`", "nats", each["difference"], "bar", NEAR, better="less") for name, each in found.items()]
    same = sum(all(each["same_bits"].values()) for each in found.values())
    near = sum(each["difference"] <= NEAR for each in found.values())
    widest = max(found.values(), key=lambda each: each["quarter_peak_bytes"] / each["quarter_budget_bytes"])
    peaks = (widest["quarter_peak_bytes"], "allowed", widest["quarter_budget_bytes"])
    bits = "the same bits in memory, in a quarter of it, on one worker, on two devices"
    return [
        *rows,
        common.compare("losses within 1e-5 of eager's", "families", near, "all", len(found), better="more", bar="ratio >= 1"),
        common.compare(bits, "families", same, "all", len(found), better="more", bar="ratio >= 1"),
        common.compare("peak in a quarter of the memory, nearest to its budget", "bytes", *peaks, better="less", bar="ratio <= 1.0"),
        common.compare("families that were tried", "families", len(found), "bar", ENOUGH, better="more", bar=f"ours >= {ENOUGH}"),
    ]


def main() -> None:
    from support.torch_families import FAMILIES

    parser = common.parser(__doc__, "torch_families")
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=list(FAMILIES), metavar="NAME", help="which ones (default: all)")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps of each run")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    machine, found = common.machine(), {}
    for name in options.families:
        found[name] = measure(name, options.steps)
        print(f"{name}: difference {found[name]['difference']:.2g}, same bits {found[name]['same_bits']}", file=sys.stderr, flush=True)
    common.finish(
        options.output,
        machine,
        ("nntask", "torch", "transformers", "numpy"),
        {"rounds": 1, "steps": options.steps, "minibatches": MINIBATCHES, "optimizer": f"AdamW, lr {RATE}"},
        comparisons(found),
        families=found,
    )


if __name__ == "__main__":
    main()
