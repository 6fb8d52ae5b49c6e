"""One training job under memory budgets: the child process of `claims`, useful alone.

    python benchmarks/memory/job.py --ram 650MB --disk scratch --steps 2
    python benchmarks/memory/job.py --model gpt2-medium --sim-gpu 2 --gpu-memory 1GB --ncpu 0

Flags are those of ``nntask train`` as far as they say where and how it runs; the data is random tokens from a fixed seed, so that losses can be
compared. Prints one JSON object: losses (exact, as hexadecimal), seconds and bytes of each step, peaks of the ledger, and resident memory above what
the process had before the model was built (RssAnon + RssShmem, sampled).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import signal
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Final

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from nntask import PRESETS
from nntask.architecture import ModelConfig
from nntask.config import CheckpointSettings, ModelSettings, OptimizerSettings, ResourceSettings, TilingSettings, TrainSettings, resolve
from nntask.data import Batch
from nntask.engine import Pending, RecordedEngine, runtime_for
from nntask.hf import read_values
from nntask.models import config_from_dict, config_from_json
from nntask.planning import plan_run
from nntask.telemetry import Meter
from nntask.training import model_to_start_from
from scheduler import Runtime

SAMPLED_SECONDS: Final = 0.1
"""Often enough for memory that a step keeps for longer; at 0.02 the sampling itself took a twentieth of a core, and the interpreter with it."""

TOLD: Final = "a step has ended"
PR_SET_PDEATHSIG: Final = 1
"""From Linux's sys/prctl.h."""


def private_bytes() -> int:
    """RssAnon + RssShmem of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


class Watch(threading.Thread):
    """Samples resident memory until stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.peak = private_bytes()
        self._stop_asked = threading.Event()

    def run(self) -> None:
        """Sample."""
        while not self._stop_asked.wait(SAMPLED_SECONDS):
            self.peak = max(self.peak, private_bytes())

    def stop(self) -> int:
        """Bytes above the start."""
        self._stop_asked.set()
        self.join()
        return max(self.peak, private_bytes()) - self.before


def config_of(args: argparse.Namespace) -> ModelConfig:
    """Return the config of a file of weights, of a JSON file or of a preset, with the dropout of the job."""
    if args.init_from:
        return config_from_dict(*read_values(Path(args.init_from)))
    config = config_from_json(args.config_path) if args.config_path else PRESETS[args.model]
    return config if args.dropout is None else config.with_dropout(args.dropout)


def settings_of(args: argparse.Namespace, config: ModelConfig) -> TrainSettings:
    """Settings of the job."""
    named = {} if args.init_from else {"config_path": args.config_path} if args.config_path else {"model": args.model}
    return TrainSettings(
        model=ModelSettings(**named, seq_len=args.seq_len or config.n_positions, dropout=args.dropout),
        checkpoints=CheckpointSettings(init_from=args.init_from),
        tiling=TilingSettings(
            batch=args.batch,
            minibatch=args.minibatch,
            minibatch_tile=args.minibatch_tile,
            seq_tile=args.seq_tile,
            vocab_tile=args.vocab_tile,
            lanes=args.lanes,
        ),
        optimizer=OptimizerSettings(train=args.train, grad_clip=args.grad_clip, lr=1e-4),
        resources=ResourceSettings(
            ncpu=args.ncpu,
            sim_gpu=args.sim_gpu,
            gpu_memory=args.gpu_memory,
            sim_bandwidth=args.sim_bandwidth,
            ram=args.ram,
            disk=args.disk,
            sched=args.sched,
            evict=args.evict,
            order=args.order,
            prefetch=not args.no_prefetch,
        ),
    )


def train(
    runtime: Runtime, engine: RecordedEngine, batches: Sequence[npt.NDArray[np.int32]], *, tell: bool = False
) -> tuple[list[str], list[dict[str, Any]]]:
    """Losses, and what happened between the end of each step and the end of the one before; two steps are in flight, as in training.

    Args:
        tell: print a line when a step has ended, for whoever stops this process between steps.
    """
    losses: list[str] = []
    laps: list[dict[str, Any]] = []
    meter, last, used = Meter(runtime.stats(forget_recent_peak=True)), perf_counter(), process_time()
    under_way: deque[Pending] = deque()
    for step in range(1, len(batches) + 2):
        if step <= len(batches):
            ids = batches[step - 1]
            under_way.append(engine.start(step, 1e-4, Batch.causal(ids[:, :-1], ids[:, 1:])))
        if step > 1:
            losses.append(float(under_way.popleft().result().loss).hex())
            now, used_now = perf_counter(), process_time()
            lap = meter.lap(runtime.stats(forget_recent_peak=True), now - last)
            laps.append({"seconds": now - last, "processor_seconds": used_now - used, **lap})
            last, used = now, used_now
            if tell:
                print(TOLD, flush=True)
    return losses, laps


def steady(laps: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Laps that began and ended with a step in flight: without the first, which fills the memory, and the last, beside which no step begins."""
    return laps[1:-1] or laps[-1:]


def end_with_parent() -> None:
    """Have the system kill this process when the one that started it ends, however that happens: a stopped process would stay for ever."""
    if ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL):
        raise SystemExit("prctl(PR_SET_PDEATHSIG) failed; --tell needs Linux")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train and measure."""
    if args.tell:
        end_with_parent()
    config = config_of(args)
    asked = resolve(settings_of(args, config), config)
    length = asked.model.seq_len
    watch = Watch()
    watch.start()
    rng = np.random.default_rng(0)
    with runtime_for(asked) as runtime:
        engine = RecordedEngine(asked, runtime, model_to_start_from(asked, runtime))
        order = engine.order
        runtime.wait()
        batches = [rng.integers(0, config.vocab_size, (args.batch, length + 1)).astype(np.int32) for _ in range(args.steps)]
        losses, laps = train(runtime, engine, batches, tell=args.tell)
        stats = runtime.stats()
    resident = watch.stop()
    predicted = {"plan": plan_run(asked.settings, config, reach=False)} if args.predict else {}
    return {
        **predicted,
        "losses": losses,
        "order": order.name,
        "needed_bytes": order.plan.needed_bytes(),
        "tokens_per_second": args.batch * length / min(lap["seconds"] for lap in steady(laps)),
        "laps": laps,
        "steady": steady(laps),
        "peak_bytes": stats["peak_bytes"],
        "budget_bytes": stats["budget_bytes"],
        "resident_above_start": resident,
    }


def parser() -> argparse.ArgumentParser:
    """The flags."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--model", default="gpt2", choices=sorted(PRESETS))
    found.add_argument("--config-path", help="config of another model as a JSON file")
    found.add_argument("--init-from", default="", help="file or directory of weights of another model")
    found.add_argument("--train", default="all")
    found.add_argument("--seq-len", type=int)
    found.add_argument("--minibatch-tile", type=int, default=1)
    found.add_argument("--seq-tile", type=int)
    found.add_argument("--batch", type=int, default=8)
    found.add_argument("--minibatch", type=int, default=1)
    found.add_argument("--vocab-tile", type=int, default=6283)
    found.add_argument("--steps", type=int, default=2)
    found.add_argument("--dropout", type=float)
    found.add_argument("--grad-clip", type=float, default=0.0)
    found.add_argument("--lanes", type=int)
    found.add_argument("--ncpu", type=int, default=2)
    found.add_argument("--sim-gpu", type=int, default=0)
    for name in ("gpu-memory", "sim-bandwidth", "ram", "disk"):
        found.add_argument(f"--{name}", default="")
    found.add_argument("--sched", default="auto")
    found.add_argument("--evict", default="next-use")
    found.add_argument("--order", default="auto")
    found.add_argument("--no-prefetch", action="store_true")
    found.add_argument("--tell", action="store_true", help="print a line whenever a step has ended")
    found.add_argument("--predict", action="store_true", help="add what nntask plan says, with the rates that this run has measured")
    return found


if __name__ == "__main__":
    json.dump(run(parser().parse_args()), sys.stdout)
    print()
