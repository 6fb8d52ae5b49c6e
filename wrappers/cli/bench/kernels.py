"""``nntask bench kernels``: seconds of a training step by codelet, and each kernel's fraction of this core's peak.

The step is captured as `nntask train` would record it. Of every kind of task in it (codelet, shapes, types, access modes) one is run on arrays of its
own, on this thread with one BLAS thread, like on a worker: after a warm-up, over sets of arrays that together exceed the caches. The median of its
times counts. The sum over all tasks is the time of one worker for a step without waiting, copies or scheduling.

A task is compared with the roofline of the same run (Williams, Waterman and Patterson 2009): it takes at least flops / (sgemm peak of one core)
and at least bytes / (copy bandwidth of one core). The larger of these bounds decides whether a codelet is compared with products or with copies,
and the bound divided by the measured time is its fraction of the peak. Bytes are those of tiles read plus tiles written, once each; scratch,
write-allocation, and rows of a table that no token can name are not counted. Flops are those of matrix products; other operations never bind. The
rows that a lookup reads in one of several vocabulary tiles depend on the tokens, so the bytes of embedding are an upper limit and its rate may
exceed that of copies."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from nntask.architecture import ModelConfig
    from nntask.config import TrainSettings
    from scheduler.machine import RecordedTask, StepPlan

COLD_BYTES: Final = 96 << 20
"""Least bytes of the arrays of one kind of task, all sets together: more than the last cache of most machines."""
MOST_SETS: Final = 32
COPY_BYTES: Final = 4 << 20
"""Bytes of an array of the copies that kernels are compared with, about those of a tile."""
TABLES: Final = {"embedding": 1, "embedding_backward": 2}
"""Codelet -> index of the table argument, of which a task touches at most one row per token; the tokens are argument 0."""
_WARMUP: Final = 2
_LARGE: Final = 1536


@dataclass(frozen=True, slots=True)
class KernelsSettings:
    """Time, rate, share of a step and distance from the machine's peak, by codelet of a training step."""

    json: bool = False
    """print JSON"""
    model: str = "gpt2"
    """preset"""
    config_path: str = ""
    """GPT-2 config, a JSON file with Hugging Face keys; instead of --model"""
    batch: int = 4
    """sequences per step"""
    minibatch: int = -1
    """sequences in flight at once, divides --batch (-1: the batch)"""
    seq_len: int | None = None
    """tokens per sequence (default n_positions)"""
    dtype: Literal["auto", "fp32", "tf32", "bf16", "fp64"] = "auto"
    """arithmetic, as in nntask train"""
    dropout: float | None = None
    """probability for all three dropouts of the config (default: the config's)"""
    repeats: int = 5
    """timed runs of each kind of task"""


@dataclass(slots=True)
class _Kind:
    """Tasks that differ only in their data."""

    task: RecordedTask
    flops: float
    nbytes: float
    count: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class _Total:
    """All kinds of one codelet, over a step."""

    tasks: int = 0
    seconds: float = 0.0
    flops: float = 0.0
    nbytes: float = 0.0
    bounds: dict[str, float] = field(default_factory=lambda: {"compute": 0.0, "memory": 0.0})


def run(settings: KernelsSettings) -> tuple[dict[str, Any], list[str]]:
    """Return the figures, and the same figures as lines of text.

    Raises:
        UsageError: a flag is wrong.
        DataError: the config cannot be read.
    """
    from nntask import UsageError
    from nntask.config import ModelSettings, TilingSettings, TrainSettings, check_values

    from ..options.sources import model_config

    if settings.repeats < 1:
        raise UsageError(f"must be at least 1, got {settings.repeats}", "use --repeats 5", flag="--repeats")
    config_path = settings.config_path or None
    train = TrainSettings(
        model=ModelSettings(
            model=None if config_path else settings.model,
            config_path=config_path,
            seq_len=settings.seq_len,
            dtype=settings.dtype,
            dropout=settings.dropout,
        ),
        tiling=TilingSettings(batch=settings.batch, minibatch=settings.minibatch),
    )
    check_values(train)
    config = model_config(train)
    kinds = kinds_of(captured(train, config).tasks)
    peak, bandwidth = _peak(), copy_bandwidth(settings.repeats)
    for kind in kinds:
        kind.seconds = measure(kind.task, config.vocab_size, settings.repeats)
    figures = {
        "model": settings.config_path or settings.model,
        "batch": settings.batch,
        "dtype": settings.dtype,
        "repeats": settings.repeats,
        "tasks": sum(kind.count for kind in kinds),
        "kinds": len(kinds),
        "gemm_peak_flops": peak,
        "copy_bytes_per_second": bandwidth,
        **_summed(kinds, peak, bandwidth),
    }
    return figures, list(_lines(figures))


def captured(settings: TrainSettings, config: ModelConfig | None = None) -> StepPlan:
    """Return the step that `nntask train` would record with these settings.

    Args:
        settings: settings of the run.
        config: config of the model; None for the preset that the settings name.

    Raises:
        UsageError: a rule of `nntask train` is broken.
    """
    from nntask.config import devices_of, resolve
    from nntask.planning import capture

    from ..options.sources import model_config

    config = model_config(settings) if config is None else config
    return capture(resolve(settings, config, machine=devices_of(settings.resources, settings.model.dtype, checks=False))).plan


def kinds_of(tasks: Sequence[RecordedTask]) -> list[_Kind]:
    """Return the kinds of tasks of a step, each with one of its tasks and their number."""
    kinds: dict[Any, _Kind] = {}
    for task in tasks:
        codelet: Any = task.codelet
        views: list[Any] = [handle.spec.view for handle, _ in task.accesses]
        cost = codelet.cost(views, task.constants) if codelet.cost is not None else (0.0, 0.0)
        switches = tuple(sorted((name, value) for name, value in task.constants.items() if isinstance(value, (bool, str))))
        key = (codelet.name, tuple((view.shape, view.dtype, mode) for view, (_, mode) in zip(views, task.accesses, strict=True)), cost[0], switches)
        if key not in kinds:
            kinds[key] = _Kind(task, cost[0], moved_bytes(task))
        kinds[key].count += 1
    return list(kinds.values())


def moved_bytes(task: RecordedTask) -> float:
    """Return the bytes that a task must read and write, each tile once in each direction it needs."""
    passes = {"R": 1, "W": 1, "RW": 2, "SCRATCH": 0}
    table = TABLES.get(getattr(task.codelet, "name", ""))
    total = 0.0
    for at, (handle, mode) in enumerate(task.accesses):
        view: Any = handle.spec.view
        nbytes = view.nbytes
        if at == table and mode != "W":  # a first write clears the whole table
            tokens: Any = task.accesses[0][0].spec.view
            nbytes = min(nbytes, nbytes // view.shape[0] * (tokens.nbytes // tokens.dtype.itemsize))
        total += passes[mode] * nbytes
    return total


def measure(task: RecordedTask, num_ids: int, repeats: int) -> float:
    """Return the median seconds of a task's kernel on arrays of its shapes.

    Args:
        task: the task.
        num_ids: upper limit of token ids, exclusive.
        repeats: minimum number of timed runs.
    """
    import numpy as np

    codelet: Any = task.codelet
    tiles: list[Any] = [(handle.spec.view, mode) for handle, mode in task.accesses]
    nbytes = sum(view.nbytes for view, mode in tiles if mode != "SCRATCH")
    number = max(1, min(MOST_SETS, -(-COLD_BYTES // max(nbytes, 1))))
    generator = np.random.default_rng(0)
    scratch = {
        at: np.zeros(view.shape, view.dtype) for at, (view, mode) in enumerate(tiles) if mode == "SCRATCH"
    }  # shared by all sets, and therefore warm, as on a worker
    sets = [[scratch[at] if at in scratch else _filled(view, generator, num_ids) for at, (view, _) in enumerate(tiles)] for _ in range(number)]
    seconds = []
    for turn in range(_WARMUP + max(repeats, min(number, 4 * repeats))):
        arrays = sets[turn % number]
        begin = perf_counter()
        codelet.cpu(*arrays, **task.constants)
        seconds.append(perf_counter() - begin)
    return statistics.median(seconds[_WARMUP:])


def _filled(view: Any, generator: Any, num_ids: int) -> Any:
    """Return an array of plausible contents: small positive numbers, or token ids below `num_ids`."""
    import numpy as np

    if view.dtype.kind in "iu":
        return generator.integers(0, num_ids, view.shape).astype(view.dtype)
    array = np.empty(view.shape, view.dtype)
    rows = array.reshape(-1, view.shape[-1])
    rows[...] = generator.uniform(0.01, 0.04, view.shape[-1]).astype(np.float32)
    rows *= generator.uniform(0.5, 1.5, (len(rows), 1)).astype(np.float32).astype(view.dtype)
    return array


def _peak() -> float:
    """Return the flop/s of fp32 products on this thread, the best of small and large products; kernels hardly exceed it."""
    import numpy as np

    from nntask.hardware import gemm_peak
    from tiles.kernels import gemm

    best, a, out = gemm_peak(1), np.ones((_LARGE, _LARGE), np.float32), np.empty((_LARGE, _LARGE), np.float32)
    for _ in range(_WARMUP + 3):
        begin = perf_counter()
        gemm(a, a, out)
        best = max(best, 2.0 * _LARGE**3 / (perf_counter() - begin))
    return best


def copy_bandwidth(repeats: int) -> float:
    """Return the bytes per second, read plus written, of copies of `COPY_BYTES` between arrays that are in no cache; the median."""
    import numpy as np

    number = -(-COLD_BYTES // (2 * COPY_BYTES))
    sources, targets = np.ones((2, number, COPY_BYTES // 4), np.float32)
    seconds = []
    for turn in range(number * (1 + repeats)):
        begin = perf_counter()
        np.copyto(targets[turn % number], sources[turn % number])
        seconds.append(perf_counter() - begin)
    return 2.0 * COPY_BYTES / statistics.median(seconds[number:])


def _summed(kinds: Sequence[_Kind], peak: float, bandwidth: float) -> dict[str, Any]:
    """Return the rows by codelet, in the order of descending seconds, and totals."""
    totals: dict[str, _Total] = {}
    for kind in kinds:
        name = getattr(kind.task.codelet, "name", "")
        total = totals.setdefault(name, _Total())
        total.tasks += kind.count
        total.seconds += kind.count * kind.seconds
        total.flops += kind.count * kind.flops
        total.nbytes += kind.count * kind.nbytes
        compute, memory = kind.flops / peak, kind.nbytes / bandwidth
        total.bounds["compute" if compute > memory else "memory"] += kind.count * max(compute, memory)
    whole = sum(total.seconds for total in totals.values())
    rows = [_row(name, total, whole) for name, total in sorted(totals.items(), key=lambda item: -item[1].seconds)]
    return {"seconds": whole, "bound_seconds": sum(sum(total.bounds.values()) for total in totals.values()), "codelets": rows}


def _row(name: str, total: _Total, whole: float) -> dict[str, Any]:
    held = max(total.bounds, key=lambda bound: total.bounds[bound])
    return {
        "codelet": name,
        "tasks": total.tasks,
        "seconds": total.seconds,
        "seconds_per_task": total.seconds / total.tasks,
        "share": total.seconds / whole,
        "flops_per_second": total.flops / total.seconds,
        "bytes_per_second": total.nbytes / total.seconds,
        "flops_per_byte": total.flops / total.nbytes,
        "held_against": held,
        "fraction_of_peak": sum(total.bounds.values()) / total.seconds,
    }


def _lines(figures: Mapping[str, Any]) -> Iterator[str]:
    peak, bandwidth = figures["gemm_peak_flops"], figures["copy_bytes_per_second"]
    yield (
        f"{figures['model']}, {figures['batch']} sequences a step, {figures['tasks']:,} tasks of {figures['kinds']} kinds; "
        f"one core: sgemm {peak / 1e9:.1f} GF/s, copies {bandwidth / 1e9:.1f} GB/s, equal at {peak / bandwidth:.1f} flops a byte"
    )
    yield f"{'codelet':24} {'tasks':>6} {'us each':>9} {'share':>6}  {'rate':>12}  {'flops/byte':>10}  peak"
    for row in figures["codelets"]:
        rate = f"{row['flops_per_second'] / 1e9:7.1f} GF/s" if row["held_against"] == "compute" else f"{row['bytes_per_second'] / 1e9:7.1f} GB/s"
        against = "sgemm" if row["held_against"] == "compute" else "copies"
        yield (
            f"{row['codelet']:24} {row['tasks']:>6} {row['seconds_per_task'] * 1e6:>9.1f} {row['share']:>6.1%}  {rate:>12}  "
            f"{row['flops_per_byte']:>10.1f}  {row['fraction_of_peak']:.0%} of {against}"
        )
    yield (
        f"kernels of a step: {figures['seconds']:.3f} s on one worker, at least {figures['bound_seconds']:.3f} s by these peaks "
        f"({figures['bound_seconds'] / figures['seconds']:.0%})"
    )
