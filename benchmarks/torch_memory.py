"""Resident memory of PyTorch sessions beside their budget.

    python benchmarks/torch_memory.py                     # all models and shares; writes benchmarks/results/torch_memory.json
    python benchmarks/torch_memory.py --models bert       # some of them
    python benchmarks/torch_memory.py --output=           # written nowhere

Each side is a process of its own: a model with random weights from a config, dropout off, fp32, a random batch, AdamW, two workers, two steps. The
first side has all the memory that it takes; the others have a half, a quarter and an eighth of it, and a disk.

*Import* is the resident memory just before the session is made, less the bytes of the module's parameters and buffers: Python, PyTorch, transformers,
nntask, and the module's structure. The C library has returned freed memory before it is read. *Excess* is the peak of recording and training, less
import and budget. The peak while the session takes the values over is reported apart, because the whole module is in memory when it begins.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import common
import torch_sessions

SHARES: Final = {"a half": 0.5, "a quarter": 0.25, "an eighth": 0.125}
WHOLE: Final = "all"
STEPS: Final = 2
BESIDE: Final = 64 << 20
"""Bar: bytes above budget and import."""
T5_BASE: Final = {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12}
MODELS: Final = {
    "bert": "BERT-base, 4 x 512",
    "neox": "GPT-NeoX 160M, 4 x 512",
    "t5-base": "T5-base, 4 x 256 and 64",
    "vit": "ViT-B/16, 8 images",
}


def make(name: str) -> tuple[Any, dict[str, Any]]:
    """A module in training mode, and its batch."""
    if name != "t5-base":
        return torch_sessions.make(name)
    import torch
    import transformers as hf

    torch.manual_seed(0)
    config = hf.T5Config(**T5_BASE, dropout_rate=0.0, decoder_start_token_id=0)
    batch = {"input_ids": torch.randint(0, 32128, (4, 256)), "labels": torch.randint(0, 32128, (4, 64)), "use_cache": False}
    return hf.T5ForConditionalGeneration(config).train(), batch


def measure(name: str, ram: str, minibatches: int) -> dict[str, float]:
    """Train in this process within a budget; "" is more than the step takes."""
    from nntask.hardware import give_back_freed
    from wrappers.torch import Session

    module, batch = make(name)
    nbytes = sum(tensor.nbytes for tensor in {id(each): each for each in (*module.parameters(), *module.buffers())}.values())
    gc.collect()
    give_back_freed()
    before = _resident("VmRSS") - nbytes
    _forget_peak()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        disk = folder if ram else None
        with Session(module, lr=1e-4, minibatches=minibatches, workers=2, ram=ram or "8GB", disk=disk) as session:
            made = _resident("VmHWM")
            _forget_peak()
            losses = [session.step(**batch) for _ in range(STEPS)]
            stats = session.runtime.stats()
            return {
                "import_bytes": before,
                "module_bytes": nbytes,
                "budget_bytes": float(stats["budget_bytes"]["ram"]),
                "used_bytes": float(stats["peak_bytes"]["ram"]),
                "peak_made_bytes": made,
                "peak_rss_bytes": _resident("VmHWM"),
                "loss_last": losses[-1],
            }


def _resident(field: str) -> int:
    """A field of /proc/self/status, bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def _forget_peak() -> None:
    """Make VmHWM begin anew at the resident memory of now."""
    Path("/proc/self/clear_refs").write_text("5")


def _rounds(name: str) -> dict[str, list[common.Measurement]]:
    """A model with all the memory that it takes, and in shares of it; all sides have one store of kernel times, which is empty at first."""
    with tempfile.TemporaryDirectory() as cache:

        def measured(share: str, ram: str) -> dict[str, list[common.Measurement]]:
            environment = {**common.one_thread_blas(), "XDG_CACHE_HOME": cache}
            return common.alternate([common.Side(share, common.this_script(__file__, f"--side={name}", f"--ram={ram}"), environment)], 1)

        found = measured(WHOLE, "")
        used = found[WHOLE][0]["used_bytes"]
        for share, factor in SHARES.items():
            found |= measured(share, f"{int(factor * used)}B")
        return found


def row(what: str, found: common.Measurement) -> dict[str, Any]:
    """The row of a model in one share of its memory."""
    allowed = found["budget_bytes"] + found["import_bytes"] + BESIDE
    return common.compare(
        f"{what}: peak memory", "bytes", found["peak_rss_bytes"], "its budget and imports, and 64 MiB", allowed, better="less", bar="ratio <= 1.0"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and keep."""
    parser = common.parser(__doc__, "torch_memory")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--side", default="", help="measure this model in this process")
    parser.add_argument("--ram", default="")
    asked = parser.parse_args(argv)
    if asked.side:
        common.report(measure(asked.side, asked.ram, 4))
        return
    before, comparisons, kept = common.machine(), [], {}
    for name in asked.models:
        kept[name] = _rounds(name)
        comparisons += [row(f"{MODELS[name]}, {share} of the RAM", kept[name][share][0]) for share in SHARES]
    common.finish(
        asked.output,
        before,
        ("nntask", "torch", "transformers", "numpy"),
        {"rounds": 1, "steps": STEPS, "workers": 2, "minibatches": 4},
        comparisons,
        rounds=kept,
    )


if __name__ == "__main__":
    main()
