"""Training on a GPU beside torch on the same card, and what the runtime costs there; `make bench-gpu` begins no row after nine minutes.

    python benchmarks/gpu/bench.py                     # all rows; writes benchmarks/gpu/results.json and docs/results/gpu.md
    python benchmarks/gpu/bench.py --only launch copies
    python benchmarks/gpu/bench.py --table             # the page alone, from what is there; --table --check fails when it shows another

Each training is `nntask train` in a process of its own on random tokens, read from its metrics.jsonl: the median over the steps after the first
few. The peers are those of `peers`: the hand-written GPT-2 of `torch_gpt2` behind torch.compile, and under FSDP2 with all in host memory. Flops
of the model are 6N + 12Ldn a token; utilisation is of the card's dense bf16 peak, and told where its name is known. A row
that did not run in time, or has no peer installed, says so; nothing is filled in.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any, Final

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common
from page import page

RESULTS: Final = Path(__file__).with_name("results.json")
PAGE: Final = common.ROOT / "docs" / "results" / "gpu.md"
BUDGET_SECONDS: Final = 540
ROW_SECONDS: Final = 150
"""Of each process."""
PEAKS: Final = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12}
"""Dense bf16 flop/s by the makers' datasheets, of the SXM parts."""
COARSE: Final = "--seq-tile=1024 --embd-tile=-1 --inner-tile=-1 --head-tile=-1 --vocab-tile=-1 --ngpu=1"
"""Tiles as GPUs like them: a minibatch tile of a layer is one task."""
SKIP: Final = 4
"""Steps before those that count."""

Row = dict[str, Any]


def gpt2(size: str) -> Any:
    """A preset without dropout."""
    from nntask import PRESETS

    return replace(PRESETS[size], resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


class Work:
    """A folder with random tokens, and trainings there.

    Args:
        folder: emptied by whoever made it.
        seconds: of each process at most.
    """

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder = folder
        self.seconds = seconds
        self.count = 0

    def tokens(self, vocab: int) -> str:
        """Flags of random tokens below `vocab`."""
        place = self.folder / f"tokens{vocab}"
        if not place.exists():
            place.mkdir()
            np.random.default_rng(0).integers(0, vocab, 4_000_000).astype(np.uint16).tofile(place / "train.bin")
        return f"--dataset=train.bin --dataset-path={place}"

    def train(self, config: Any, flags: str, steps: int, data: str = "") -> Row:
        """Run `nntask train` on random tokens, or on the data of these flags.

        Returns:
            seconds and tokens_per_second of the median step, losses, and what summary.json says.

        Raises:
            RuntimeError: it failed, and the message is its last line; or it took too long.
        """
        self.count += 1
        name = f"run{self.count}"
        (self.folder / f"{name}.json").write_text(json.dumps(config.to_dict()))
        argv = ["train", f"--config-path={name}.json", *(data or self.tokens(config.vocab_size)).split()]
        argv += [f"--run-dir={name}", "--sample-tokens=0", "--save-every=0", f"--steps={steps}", *flags.split()]
        code, said = self.run(argv)
        if code:
            raise RuntimeError(f"nntask train {flags} ended with {code}: {(said.strip() or 'no message').splitlines()[-1]}")
        lines = [json.loads(line) for line in (self.folder / name / "metrics.jsonl").read_text().splitlines()]
        timed = lines[min(SKIP, len(lines) - 1) :]
        summary = json.loads((self.folder / name / "summary.json").read_text())
        return {
            "seconds": statistics.median(line["seconds"] for line in timed),
            "tokens_per_second": statistics.median(line["tokens_per_second"] for line in timed),
            "losses": [line["loss"] for line in lines],
            "tasks_per_step": summary["tasks_per_step"],
            "started_per_step": summary["tasks"] / len(lines),
            "moved_bytes_per_step": {link: nbytes / len(lines) for link, nbytes in summary["moved_bytes"].items()},
            "peak_bytes": summary["peak_bytes"],
        }

    def run(self, argv: Sequence[str]) -> tuple[int, str]:
        """Run `nntask` in the folder, as a process of its own; its exit code and what it said of errors.

        Raises:
            RuntimeError: it took too long.
        """
        env = {**os.environ, "PYTHONPATH": str(common.ROOT)}
        done = run_within(self.seconds, [sys.executable, "-m", "nntask", *argv], cwd=self.folder, env=env)
        return done.returncode, done.stderr


def run_within(seconds: float, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program.

    Raises:
        RuntimeError: it took too long.
    """
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=seconds, **options)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{Path(argv[1]).name if argv[1] != '-m' else argv[2]} took more than {seconds:.0f} s") from None


def peer(kind: str, config: Any, steps: int, batch: int, minibatch: int, seconds: float, device: str = "cuda") -> Row | None:
    """What one of `peers` measures; None where torch has no CUDA.

    Raises:
        RuntimeError: it failed, or took too long.
    """
    try:
        import torch
    except ImportError:
        return None
    if device == "cuda" and not torch.cuda.is_available():
        return None
    sizes = json.dumps([config.vocab_size, config.n_positions, config.n_embd, config.n_layer, config.n_head])
    script = common.this_script(str(Path(__file__).with_name("peers.py")), kind, sizes, f"--batch={batch}", f"--minibatch={minibatch}")
    done = run_within(seconds, [*script, f"--steps={steps}", f"--device={device}"])
    if done.returncode:
        raise RuntimeError(f"torch ended with {done.returncode}: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found


def nominal_peak(card: str) -> float | None:
    """Flop/s of dense bf16 products, where the card's name is known."""
    return next((flops for name, flops in PEAKS.items() if name in card), None)


def compiled_peer(config: Any, steps: int, seconds: float) -> tuple[Row | None, str]:
    """What torch.compile reaches at the largest minibatch that it has memory for, and in words which one, or why there is no figure."""
    reason = "torch has no CUDA here"
    for minibatch in (16, 8, 4):
        try:
            found = peer("compiled", config, steps, 16, minibatch, seconds)
        except RuntimeError as error:  # often memory is short; our own figure stays
            reason = f"no figure of torch: {error}"
        else:
            return (found, f"torch in minibatches of {minibatch}") if found else (None, reason)
    return None, reason


def trained(work: Work, card: str, size: str, steps: int) -> Row:
    """The rate of one model beside torch."""
    config = gpt2(size)
    ours = work.train(config, f"{COARSE} --dtype=bf16 --batch=16 --minibatch=16 --minibatch-tile=16", steps)
    found, about_peer = compiled_peer(config, steps, work.seconds)
    theirs = found["tokens_per_second"] if found else None
    flops = common.model_flops(config, 1024) / 1024  # a token
    peak = nominal_peak(card)
    mfu = ours["tokens_per_second"] * flops / peak if peak else None
    ratio = ours["tokens_per_second"] / theirs if theirs else None
    text = f"{ours['tokens_per_second']:,.0f} tokens/s" + (f", {ratio:.2f} x torch's {theirs:,.0f}" if theirs else f", {about_peer}")
    goal = 0.5 if size == "gpt2-xl" else 0.4
    return {
        "measured": text + (f", MFU {mfu:.0%}" if mfu else ""),
        "met": None if ratio is None or mfu is None else ratio >= 1 and mfu >= goal,
        "ours": _without_losses(ours),
        "torch_tokens_per_second": theirs,
        "torch": about_peer,
        "mfu": mfu,
    }


def launch(work: Work, card: str) -> Row:
    """Host time: a model so small that the card waits for the host, whose step is then the host's; and its share of a step of GPT-2 small."""
    tiny = replace(gpt2("tiny"), n_layer=24)
    flags = "--batch=4 --minibatch=1 --minibatch-tile=1 --seq-tile=256 --embd-tile=-1 --inner-tile=-1 --head-tile=-1 --vocab-tile=-1 --ngpu=1"
    found = work.train(tiny, f"{flags} --dtype=bf16", 40)
    single = work.train(tiny, f"{flags} --dtype=bf16 --no-graphs", 20)
    per_task = found["seconds"] / found["tasks_per_step"]
    alone = single["seconds"] / single["tasks_per_step"]
    small = work.train(gpt2("gpt2"), f"{COARSE} --dtype=bf16 --batch=16 --minibatch=16 --minibatch-tile=16", 10)
    share = per_task * small["tasks_per_step"] / small["seconds"]
    text = f"{per_task * 1e6:.1f} us a task (an upper bound: the step of a small model over its tasks; {alone * 1e6:.1f} with --no-graphs), "
    text += f"{share:.1%} of a step of GPT-2 small"
    return {
        "measured": text,
        "met": per_task <= 8e-6 and share <= 0.05,
        "seconds_per_task": per_task,
        "share": share,
        "without_graphs": alone,
    }


def beyond(work: Work, card: str) -> Row:
    """XL in memory and with a quarter of what the step needs."""
    config = gpt2("gpt2-xl")
    flags = f"{COARSE} --dtype=bf16 --batch=32 --minibatch=4 --minibatch-tile=4 --recompute=block"
    whole = work.train(config, flags, 14)  # steps 4 and 5 took 1.6 times as long as step 3
    quarter = max(whole["peak_bytes"]["cuda:0"] // 4, 1 << 30)
    tight = work.train(config, f"{flags} --gpu-memory={quarter}B", 8)
    ratio = tight["tokens_per_second"] / whole["tokens_per_second"]
    equal = tight["losses"] == whole["losses"][: len(tight["losses"])]
    text = f"{ratio:.2f} of the rate in memory with {quarter / 1e9:.1f} GB, losses {'equal' if equal else 'differ'}"
    return {"measured": text, "met": ratio >= 0.8 and equal, "in_memory": _without_losses(whole), "tight": _without_losses(tight)}


def reach(work: Work, card: str) -> Row:
    """GPT-2 medium with a seventh of its state."""
    config = gpt2("gpt2-medium")
    state = 14 * config.num_parameters  # bf16 weights, fp32 gradients, masters and two moments, less what is tied
    found = work.train(config, f"{COARSE} --dtype=bf16 --batch=2 --minibatch=1 --minibatch-tile=1 --vocab-tile=6283 --gpu-memory={state // 7}B", 3)
    whole = work.train(config, f"{COARSE} --dtype=bf16 --batch=2 --minibatch=1 --minibatch-tile=1 --vocab-tile=6283", 3)
    equal = found["losses"] == whole["losses"]
    return {
        "measured": f"{'yes' if equal else 'no'}, with {state / 7e9:.2f} GB for a state of {state / 1e9:.1f} GB",
        "met": equal,
        "losses": found["losses"],
    }


def offload(work: Work, card: str) -> Row:
    """XL with as much of the card as FSDP2 takes with everything offloaded, at the faster of two minibatches: it streams the weights for each.

    What our libraries take beside the budget is in torch's figure, so it is taken from ours. DeepSpeed is none of the development tools.
    """
    from tiles.kernels import PARTIALS_NBYTES, SPARE_NBYTES, WORKSPACE_NBYTES

    config, batch = gpt2("gpt2-xl"), 32
    tried = [found for minibatch in (8, 32) if (found := peer("offloaded", config, 3, batch, minibatch, work.seconds)) is not None]
    if not tried:
        return {"measured": "not measured: torch has no CUDA here", "met": None}
    theirs = max(tried, key=lambda found: found["tokens_per_second"])
    nbytes = int(theirs["peak_bytes"]) - SPARE_NBYTES - PARTIALS_NBYTES - WORKSPACE_NBYTES
    flags = f"{COARSE} --dtype=bf16 --batch={batch} --minibatch=4 --minibatch-tile=4 --recompute=block"
    ours = work.train(config, f"{flags} --gpu-memory={nbytes}B", 6)
    ratio = ours["tokens_per_second"] / theirs["tokens_per_second"]
    text = f"GPT-2 XL with {theirs['peak_bytes'] / 1e9:.1f} GB: {ours['tokens_per_second']:,.0f} tokens/s, {ratio:.2f} x FSDP2's "
    text += f"{theirs['tokens_per_second']:,.0f}; DeepSpeed not measured"
    return {"measured": text, "met": ratio >= 1, "ours": _without_losses(ours), "fsdp2": theirs}


def copies(work: Work, card: str) -> Row:
    """Tiles of 16 MiB through the runtime, several under way at a time, against one large copy each way."""
    from nntask.hardware import cards
    from scheduler import Codelet, Runtime, W
    from scheduler.storage import HostArena
    from tiles import TileView

    facts = cards.choose(1)
    (gpu,) = cards.open([(facts[0], None)], tf32=False, dtype="fp32")
    nbytes, count = 16 << 20, 64
    raw: dict[str, float] = {}
    host = HostArena(nbytes * 16)
    is_pinned = gpu.pin(host.address, nbytes * 16)
    place, stream, begin, end = gpu.reserve(nbytes * 16), gpu.stream(), gpu.event(), gpu.event()
    for name, pair in (("to the card", (place, host.address)), ("back", (host.address, place))):
        for _ in range(3):
            stream.record(begin)
            stream.copy(*pair, nbytes * 16)
            stream.record(end)
            end.wait()
            raw[name] = max(raw.get(name, 0.0), nbytes * 16 / end.seconds_since(begin))
    gpu.release(place)
    if is_pinned:
        gpu.unpin(host.address)
    touch, look = Codelet("touch", cuda=lambda *views: None), Codelet("look", cpu=lambda *views: None)
    view = TileView((nbytes,), np.dtype(np.uint8))
    with Runtime(4, gpus=[gpu], gpu_memory=nbytes * (count + 2), ram=nbytes * (count + 2)) as runtime:
        handles = [runtime.handle(nbytes, view) for _ in range(count)]
        ours: dict[str, float] = {}
        for _ in range(3):
            for handle in handles:
                with runtime.acquire(handle, W) as data:
                    data[::4096] = 1
            start = perf_counter()
            for handle in handles:
                runtime.submit(touch, [(handle, "RW")], {})
            runtime.wait()
            ours["to the card"] = max(ours.get("to the card", 0.0), nbytes * count / (perf_counter() - start))
            start = perf_counter()
            for handle in handles:
                runtime.submit(look, [(handle, "R")], {})
            runtime.wait()
            ours["back"] = max(ours.get("back", 0.0), nbytes * count / (perf_counter() - start))
    ratios = {name: ours[name] / raw[name] for name in raw}
    text = ", ".join(f"{name} {ours[name] / 1e9:.1f} of {raw[name] / 1e9:.1f} GB/s" for name in raw)
    return {"measured": text, "met": min(ratios.values()) >= 0.85, "raw": raw, "ours": ours}


def parts(work: Work, card: str) -> Row:
    """GPT-2 small on two parts of the card."""
    flags = f"{COARSE} --dtype=bf16 --batch=4 --minibatch=1 --minibatch-tile=1"
    one, two = work.train(gpt2("gpt2"), flags, 8), work.train(gpt2("gpt2"), f"{flags} --ngpu=1x2", 8)
    near = all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(one["losses"], two["losses"], strict=True))
    busy = all(two["peak_bytes"].get(f"cuda:{number}", 0) > 0 for number in range(2))
    rate = two["tokens_per_second"] / one["tokens_per_second"]
    return {"measured": f"losses {'within' if near else 'beyond'} rounding, both used: {busy}, {rate:.2f} of the rate of one", "met": near and busy}


def numerics(work: Work, card: str) -> Row:
    """A small model for 200 steps in fp32 and bf16."""
    flags = "--batch=8 --minibatch=8 --minibatch-tile=8 --seq-tile=256 --embd-tile=-1 --inner-tile=-1 --head-tile=-1 --vocab-tile=-1 --ngpu=1"
    found = {dtype: work.train(gpt2("tiny"), f"{flags} --dtype={dtype}", 200, "--dataset=stdlib")["losses"] for dtype in ("fp32", "bf16")}
    last = {dtype: statistics.mean(losses[-10:]) for dtype, losses in found.items()}
    away = abs(last["bf16"] / last["fp32"] - 1)
    return {"measured": f"{away:.2%} away over the last ten steps ({last['bf16']:.3f} and {last['fp32']:.3f})", "met": away <= 0.01, "losses": last}


ROWS: Final[Mapping[str, Callable[[Work, str], Row]]] = {
    "copies": copies,
    "small": lambda work, card: trained(work, card, "gpt2", 20),
    "launch": launch,
    "numerics": numerics,
    "parts": parts,
    "xl": lambda work, card: trained(work, card, "gpt2-xl", 10),
    "beyond": beyond,
    "reach": reach,
    "offload": offload,
}
"""In the order in which they run: the quick ones first."""


def _without_losses(run: Row) -> Row:
    return {name: value for name, value in run.items() if name != "losses"}


def main() -> int:
    """Run rows, keep what was found, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="*", choices=tuple(ROWS), default=tuple(ROWS))
    parser.add_argument("--seconds", type=float, default=BUDGET_SECONDS, help="begin no row after so many")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args()
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": {}}
    if asked.table:
        if asked.check:
            return int(PAGE.read_text(encoding="utf-8") != page(results))
        PAGE.write_text(page(results), encoding="utf-8")
        return 0
    from nntask.hardware import cards
    from scheduler.drivers import NoGpu

    try:
        card = cards.choose(1)[0].name
    except NoGpu as error:
        print(error, file=sys.stderr)
        return 2
    started = monotonic()
    with tempfile.TemporaryDirectory() as folder:
        work = Work(Path(folder), ROW_SECONDS)
        for name in (name for name in ROWS if name in asked.only):
            if monotonic() - started > asked.seconds:
                print(f"{name}: no time left; run it with --only {name}", flush=True)
                continue
            begin = monotonic()
            try:
                row = ROWS[name](work, card)
            except Exception as error:  # one row must not take the others along
                row = {"measured": f"failed: {str(error)[:300]}", "met": False}
            stamp = {"date": common.datetime.date.today().isoformat(), "commit": common.commit()}
            results["rows"][name] = row | {"took_seconds": round(monotonic() - begin, 1)} | stamp
            print(f"{name}: {row['measured']} ({monotonic() - begin:.0f} s)", flush=True)
            results |= {"gpu": card, "versions": common.versions("cupy-cuda12x", "cupy-cuda13x", "torch"), "settings": {"rounds": 1}}
            results["machine"] = common.machine()
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(page(results), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
