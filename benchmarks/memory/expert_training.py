"""Training mixtures of experts beyond memory: all weights above a disk, and LoRA on experts that stay quantised in a file.

    python benchmarks/memory/expert_training.py               # all weights, with a quarter of the RAM that a step needs, in three batches
    python benchmarks/memory/expert_training.py --suite lora  # adapters on frozen 4-bit experts, with a part of the RAM that they need

Each writes benchmarks/results/expert_training_SUITE.json. A pair is two jobs (`job`), one with all memory and one within `--ram` above `--disk`; they
take turns step by step (`claims`). The rate of the disk is measured before the first pair, with direct I/O in pieces of a tile by the threads of the
disk tier: the bytes of a step over that rate bound the seconds of any schedule. Bytes of weights, gradients and moments do not grow with the batch.
Processor time of a step, all threads together, is the figure that other programs disturb least; workers compute with all cores, so its ratio bounds
that of seconds on a quiet machine. Both sides have the same random tokens
and first weights; their losses must be equal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import claims
import common
import experts
import numpy as np

from nntask.models import FAMILIES
from scheduler.storage import DiskTier, HostArena

LENGTH: Final = 512
"""Tokens of a sequence."""
SHAPE: Final = {"vocab": 2048, "width": 512, "inner": 512, "layers": 2, "experts": 32, "chosen": 4}
"""Model of the suite `full`: an OLMoE, of whose weights in experts an eighth works on a token."""
TINY: Final = {"vocab": 256, "width": 64, "inner": 64, "layers": 1, "experts": 4, "chosen": 2}
BATCHES: Final = {
    "4 x 512 tokens, 1 at a time": ("--batch=4", "--minibatch=1"),
    "16 x 512 tokens, 1 at a time": ("--batch=16", "--minibatch=1"),
    "16 x 512 tokens, 4 at a time": ("--batch=16", "--minibatch=4"),
}
"""Tokens of a step, and sequences of a minibatch -> flags."""
FROZEN: Final = {"num_layers": 4, "width": 1024, "num_experts": 32, "num_chosen": 4, "kind": "q4_0"}
"""Model of the suite `lora`: arguments of `experts.write_file`."""
TINY_FROZEN: Final = {"num_layers": 1, "width": 128, "num_experts": 4, "num_chosen": 2, "kind": "q4_0"}
ADAPTERS: Final = ("--train=lora:8", "--seq-len=256", "--batch=8", "--minibatch=4")
PART: Final = 0.3
"""Budget of RAM over the needs of the step, suite `lora`."""
PIECE: Final = 1 << 20
"""Bytes of a request when the rate of the disk is measured: those of a matrix of an expert."""
REQUESTS: Final = 256
IN_FLIGHT: Final = 4
"""Requests in flight, as many as the disk tier has threads."""


def disk_rate(folder: str) -> dict[str, float]:
    """Bytes per second that the disk tier writes, and reads, in `folder`."""
    tier, arena = DiskTier(folder), HostArena(IN_FLIGHT * PIECE)
    rates = {}
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        for name, copy in (("write", tier.write), ("read", tier.read)):
            begin = perf_counter()
            list(pool.map(lambda number, copy=copy: copy(arena, number % IN_FLIGHT * PIECE, number * PIECE, PIECE), range(REQUESTS)))
            rates[name] = REQUESTS * PIECE / (perf_counter() - begin)
    tier.close()
    return rates


def compared(what: str, sides: Mapping[str, claims.Result], num_tokens: int, rates: Mapping[str, float], bar: float) -> list[dict[str, Any]]:
    """Rows of a pair: speed, processor time, and the least time of the copies. A speed is not resolved if quartiles of rounds enclose its bar.

    Args:
        sides: results of the job beyond memory and of the job in memory, in that order.
        num_tokens: tokens of a step.
        bar: least ratio of speeds; processor time may grow by its inverse.
    """
    (beyond, inside), (name, peer) = sides.values(), sides
    seconds = [statistics.median(side["seconds"]) for side in (beyond, inside)]
    processor = [statistics.median(lap["processor_seconds"] for lap in side["steady"]) for side in (beyond, inside)]
    copying = statistics.median(sum(moved / rates[_direction(link)] for link, moved in lap["moved_bytes"].items()) for lap in beyond["steady"])
    label = f"{what}, {name}"
    speed = common.compare(label, "tokens/s", num_tokens / seconds[0], peer, num_tokens / seconds[1], better="more", bar=f"ratio >= {bar}")
    low, high = np.quantile(np.divide(inside["seconds"], beyond["seconds"]), (0.25, 0.75)).tolist()
    speed["quartiles"] = [round(low, 4), round(high, 4)]
    if low < bar <= high:
        speed["verdict"] = "not resolved"
    rows = [
        speed,
        common.compare(f"{label}: processor time", "s a step", processor[0], peer, processor[1], better="less", bar=f"ratio <= {1 / bar:.3g}"),
        common.compare(f"{label}: its copies at the rate of the disk", "s a step", copying, peer, seconds[1], better="less"),
    ]
    for row in rows:
        print(row, flush=True)
    return rows


def _direction(link: str) -> str:
    return "write" if link.endswith(">disk") else "read"


def check(sides: Mapping[str, claims.Result]) -> None:
    """Check that both sides have the same losses, and that each kept its budget.

    Raises:
        SystemExit: they differ, or one did not.
    """
    losses = {tuple(side["losses"]) for side in sides.values()}
    if len(losses) > 1:
        raise SystemExit(f"losses differ: {losses}")
    for name, side in sides.items():
        if side["peak_bytes"]["ram"] > side["budget_bytes"]["ram"]:
            raise SystemExit(f"{name} took {side['peak_bytes']['ram']:,} bytes of {side['budget_bytes']['ram']:,}")


def full(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All weights are trained, with a quarter of the RAM that a step needs."""
    shape = TINY if args.tiny else SHAPE
    config = FAMILIES["olmoe"].config.of_size(
        *(shape[name] for name in ("vocab", "width", "inner", "layers")),
        shape["width"] // 64,
        LENGTH,
        num_experts=shape["experts"],
        num_experts_per_tok=shape["chosen"],
        output_router_logits=True,
    )
    path = folder / "config.json"
    path.write_text(json.dumps(config.to_dict()))
    rates, rows, runs = disk_rate(str(folder)), list[dict[str, Any]](), {}
    for what, batch in BATCHES.items():
        if not what.startswith(args.only or ""):
            continue
        flags = [f"--config-path={path}", f"--vocab-tile={shape['vocab']}", *batch]
        needed = claims.job([*flags, "--steps=1"], None)["needed_bytes"]
        sides = in_pairs(flags, "a quarter of the RAM and a disk", f"--ram={needed // 4}B", folder, args.rounds)
        num_tokens = LENGTH * int(batch[0].partition("=")[2])
        rows += compared(what, sides, num_tokens, rates, 0.85)
        runs[what] = {"needed_bytes": needed, **sides}
    return {"weights": config.num_parameters, "disk_bytes_per_second": rates, "comparisons": rows, "runs": runs}


def lora(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Adapters are trained; the experts stay quantised in a file, from which they are read in every step."""
    path = experts.write_file(folder, **(TINY_FROZEN if args.tiny else FROZEN))
    rates = disk_rate(str(folder))
    flags = [f"--init-from={path}", f"--vocab-tile={experts.VOCAB}", *ADAPTERS]
    needed = claims.job([*flags, "--steps=1"], None)["needed_bytes"]
    name = "experts in a file and a disk"
    sides = in_pairs(flags, name, f"--ram={int((0.9 if args.tiny else PART) * needed)}B", folder, args.rounds)
    rows = compared("LoRA on 4-bit experts, 8 x 256 tokens", sides, 8 * 256, rates, 0.87)
    peaks = [side["resident_above_start"] for side in sides.values()]
    rows.append(
        common.compare(f"LoRA on 4-bit experts, {name}: peak", "bytes", peaks[0], "everything fits", peaks[1], better="less", bar="ratio <= 0.45")
    )
    return {"weights_bytes": path.stat().st_size, "needed_bytes": needed, "disk_bytes_per_second": rates, "comparisons": rows, "runs": dict(sides)}


def in_pairs(flags: Sequence[str], name: str, ram: str, folder: Path, rounds: int) -> dict[str, claims.Result]:
    """Run a job beyond memory and one in memory in turns, and check both."""
    sides = claims.in_turns({name: [*flags, ram, f"--disk={folder}"], "everything fits": list(flags)}, rounds)
    check(sides)
    return sides


SUITES: Final = {"full": full, "lora": lora}


def main() -> None:
    """Run a suite."""
    parser = common.parser(__doc__, None)
    parser.add_argument("--suite", choices=tuple(SUITES), default="full")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--only", help="beginning of the batches of the suite full to run (default: all)")
    parser.add_argument("--disk", default="", help="directory of the disk tier and of the files (default: a temporary one)")
    parser.add_argument("--tiny", action="store_true", help="models of a moment, whose results are not kept")
    args = parser.parse_args()
    machine = common.machine()
    with tempfile.TemporaryDirectory(dir=args.disk or None) as folder:
        result = SUITES[args.suite](args, Path(folder))
    name = f"expert_training_{args.suite}" if args.output is None else args.output
    common.finish(name, machine, ("numpy", "numba"), {"rounds": args.rounds}, keep=not (args.only or args.tiny), **result)


if __name__ == "__main__":
    main()
