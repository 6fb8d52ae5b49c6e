"""The commands of `first_card` that train, and attention: losses beside the CPU's, memory that is too small, rates, profiles."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import bench
import common
from first_card_here import Check, Here, near

CPU_LOSSES: Final = 1e-3
"""Most that losses of the CPU and the card differ by, relative."""


def tiny(here: Here) -> Iterator[Check]:
    """A little GPT-2 on Python's library, or random tokens in a rehearsal."""
    data = "" if here.rehearse else "--dataset=stdlib"
    kept: dict[str, list[float]] = {}

    def train(config: Any, flags: str) -> list[float]:
        found: list[float] = here.work.train(config, flags, here.steps(12), data)["losses"]
        return found

    def run(name: str) -> dict[str, Any]:
        config, sizes = here.config("tiny"), here.sizes(4, 2)
        if name == "dropout":
            config = replace(config, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
        key = "dropout" if name == "dropout" else "plain"
        if key not in kept:
            kept[key] = train(config, f"{sizes.replace('--ngpu=1', '--ngpu=0 --ncpu=1')} --dtype=fp32")
        dtype, band = {"tf32": ("tf32", 5e-3), "bf16": ("bf16", 2e-2)}.get(name, ("fp32", CPU_LOSSES))
        away = near(train(config, f"{sizes} --dtype={dtype}"), kept[key], band)
        return {"away": float(f"{away:.2e}"), "last loss": kept[key][-1]}

    for name in ("fp32", "dropout", "tf32", "bf16"):
        yield name, lambda name=name: run(name)


def small(here: Here) -> Iterator[Check]:
    """Two sequences a step are enough to be wrong."""

    def run() -> dict[str, Any]:
        config, sizes = here.config("gpt2"), here.sizes(2, 2)
        workers = 1 if here.rehearse else min(8, common.usable_cores())
        ours = here.work.train(config, f"{sizes} --dtype=fp32", here.steps(4))
        want = here.work.train(config, f"{sizes.replace('--ngpu=1', f'--ngpu=0 --ncpu={workers}')} --dtype=fp32", here.steps(4))
        away = near(ours["losses"], want["losses"], CPU_LOSSES)
        return {"away": float(f"{away:.2e}"), "losses": ours["losses"], "seconds a step": ours["seconds"], "the CPU's": want["seconds"]}

    yield "fp32", run


def beyond(here: Here, size: str, batch: int, minibatch: int) -> Iterator[Check]:
    """All its memory, half and a quarter of it: the same losses."""
    kept: dict[str, Any] = {}

    def run(name: str, share: float) -> dict[str, Any]:
        flags = f"{here.sizes(batch, minibatch)} --dtype=bf16 --recompute=block"
        if name != "whole":
            assert kept, "the run with all memory has failed, so there is nothing to compare with"
            nbytes = max(int(kept["peak_bytes"]["cuda:0"] * share), 1 << 17 if here.rehearse else 1 << 30)
            flags += f" --gpu-memory={nbytes}B"
        found = here.work.train(here.config(size), flags, here.steps(14 if name == "whole" else 8))
        if not kept:
            kept.update(found)
        assert found["losses"] == kept["losses"][: len(found["losses"])], "losses depend on memory"
        words = {
            "tokens/s": round(found["tokens_per_second"]),
            "of the rate in memory": round(found["tokens_per_second"] / kept["tokens_per_second"], 3),
        }
        return words | {"peak bytes": found["peak_bytes"]["cuda:0"], "moved a step": found["moved_bytes_per_step"]}

    for name, share in (("whole", 1.0), ("half", 0.5), ("quarter", 0.25)):
        yield name, lambda name=name, share=share: run(name, share)


def copies(here: Here) -> Iterator[Check]:
    """`bench.copies`."""
    if not here.rehearse:
        yield "tiles", lambda: bench.copies(here.work, "")


def speed(here: Here, size: str, minibatch: int) -> Iterator[Check]:
    """Tokens a second beside PyTorch's."""
    config = here.config(size)

    def ours() -> dict[str, Any]:
        found = here.work.train(config, f"{here.sizes(16, minibatch)} --dtype=bf16", here.steps(14))
        peak = bench.nominal_peak(here.cards.choose(1)[0].name)
        mfu = found["tokens_per_second"] * common.model_flops(config, config.n_positions) / config.n_positions / peak if peak else None
        return {"tokens/s": round(found["tokens_per_second"]), "MFU": mfu and round(mfu, 3), "tasks a step": found["tasks_per_step"]}

    def peer(kind: str) -> dict[str, Any]:
        batch, steps = (2, 2) if here.rehearse else (16, 12)
        found = bench.peer(kind, config, steps, batch, min(batch, minibatch), 150.0, device="cpu" if here.rehearse else "cuda")
        return {"tokens/s": round(found["tokens_per_second"])} if found else {"failed": "this Python has no torch with CUDA"}

    yield "ours", ours
    yield "torch eager", lambda: peer("eager")
    if not here.rehearse:  # a compiler of its own
        yield "torch compiled", lambda: peer("compiled")


def host(here: Here) -> Iterator[Check]:
    """A model so small that the card waits for the host: the step over its tasks is the host's time."""

    def run(flags: str) -> dict[str, Any]:
        config = here.config("tiny") if here.rehearse else replace(bench.gpt2("tiny"), n_layer=24)
        found = here.work.train(config, f"{here.sizes(4, 1)} --dtype=bf16 {flags}", here.steps(30))
        return {"us a task": round(1e6 * found["seconds"] / found["tasks_per_step"], 2), "tasks a step": found["tasks_per_step"]}

    yield "graphs", lambda: run("")
    yield "no graphs", lambda: run("--no-graphs")


def profile(here: Here, size: str, minibatch: int) -> Iterator[Check]:
    """Where the time of a step goes, by kind of task."""

    def run(graphs: str) -> dict[str, Any]:
        number = here.work.count + 1
        steps = here.steps(8)
        flags = f"{here.sizes(16, minibatch)} --dtype=bf16 {graphs} --trace-steps={steps - 1}:{steps}@trace{number}.json"
        found = here.work.train(here.config(size), flags, steps)
        events = json.loads((here.work.folder / f"trace{number}.json").read_text())["traceEvents"]
        spent: Counter[str] = Counter()
        for event in events:
            if event.get("ph") == "X" and event["pid"] == 1:
                spent[event["name"]] += event["dur"]
        whole = sum(spent.values()) or 1.0
        rows = {name: f"{1e-3 * us / 2:.2f} ms, {us / whole:.0%}" for name, us in spent.most_common(14)}
        return {"seconds a step": found["seconds"], "busy a step": round(1e-6 * whole / 2, 4)} | rows

    yield "single tasks", lambda: run("--no-graphs")
    yield "fused", lambda: run("")


def kernel_speed(here: Here) -> Iterator[Check]:
    """The kernels of a step one at a time, in graphs."""
    from kernel_speed import measure

    sizes = (
        {"tiny": (1, 8, 1, 60)} if here.rehearse else {"GPT-2 small, 16 x 1024": (16, 1024, 12, 50257), "GPT-2 XL, 4 x 1024": (4, 1024, 25, 50257)}
    )
    for name, (batch, length, heads, vocab) in sizes.items():
        yield name, lambda given=(batch, length, heads, vocab): measure(here.devices()[0], *given)


def attention(here: Here) -> Iterator[Check]:
    """One layer's attention, forward and backward, beside cuDNN's and scaled_dot_product_attention; and what a training chooses by itself."""
    from attention_speed import cudnn_seconds, ours_seconds, torch_seconds

    for length, size in ((8, 64),) if here.rehearse else ((1024, 64), (4096, 64), (1024, 128), (4096, 128)):

        def run(length: int = length, size: int = size) -> dict[str, Any]:
            heads = 1 if here.rehearse else 12
            ours = ours_seconds(here.devices()[0], 1 if here.rehearse else 8, length, heads, size)
            words = {name: f"{1e3 * seconds:.3f} ms" for name, seconds in ours.items()}
            for name, value in cudnn_seconds(here.devices()[0], 1 if here.rehearse else 8, length, heads, size).items():
                words[f"cuDNN {name}"] = f"{1e3 * value:.3f} ms" if name.endswith("ward") else str(value)
            return words | {f"torch {name}": f"{1e3 * seconds:.3f} ms" for name, seconds in torch_seconds(8, length, heads, size).items()}

        yield f"{length} x {size}", run

    def auto() -> dict[str, Any]:
        found = here.work.train(here.config("gpt2"), f"{here.sizes(16, 8)} --dtype=bf16 --attention=auto", here.steps(12))
        plan = json.loads((here.work.folder / f"run{here.work.count}" / "plan.json").read_text())
        return {**plan["gpu_attention"], "tokens/s": round(found["tokens_per_second"])}

    yield "the choice of --attention auto", auto
