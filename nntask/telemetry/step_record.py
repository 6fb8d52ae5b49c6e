"""The figures of one training step in metrics.jsonl."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One line of metrics.jsonl.

    Args:
        step: number of the step, from 1.
        loss: printed loss, mean or sum over the step's tokens.
        lr: learning rate of the step.
        grad_norm: norm of the whole gradient before clipping.
        tokens: number of tokens of the step.
        seconds: seconds since the end of the step before.
        tokens_per_second: tokens / seconds.
        tflops: 10^12 model flops (6N + 12Ldn per token) per second.
        mfu: tflops over the gemm peak of the workers, the best measured rate of products in the run's element type.
        resident_peak_bytes: most bytes held on each node during the step.
        moved_bytes: bytes moved over each link during the step.
        evictions: number of replicas evicted during the step.
        wait_seconds: seconds outside of kernels, of all workers together.
        stall_seconds: part of wait_seconds in which a task was ready for the worker, but its data was on the way or had no memory to go to.
        hit_rate: share of the inputs of the step's tasks that were in place, or on their way, when the task was admitted.
        busy_seconds: seconds of each worker in kernels that ended during the step.
        worker_stall_seconds: part of stall_seconds of each worker that has any.
        recomputed_tasks: number of tasks that recomputed values during the step.
        recompute_seconds: seconds in the kernels of these tasks, of all workers together.
        skipped_tasks: number of conditional tasks that were skipped, such as those of experts that no token chose.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    seconds: float
    tokens_per_second: float
    tflops: float
    mfu: float
    resident_peak_bytes: dict[str, int]
    moved_bytes: dict[str, int]
    evictions: int
    wait_seconds: float
    stall_seconds: float
    hit_rate: float
    busy_seconds: dict[str, float] = field(default_factory=dict)
    worker_stall_seconds: dict[str, float] = field(default_factory=dict)
    recomputed_tasks: int = 0
    recompute_seconds: float = 0.0
    skipped_tasks: int = 0
