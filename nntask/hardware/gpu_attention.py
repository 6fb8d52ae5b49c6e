"""Choice between nntask's kernels and cuDNN for attention on the GPUs of a run, and the seconds of both on its cards.

cuDNN's workspace is outside of the memory for tiles, so it comes out of each device's budget.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, NamedTuple

import scheduler
from scheduler.drivers import is_fatal
from tiles.kernels import ATTENTION_WORKSPACE_NBYTES, INSTALL_CUDNN, WholeShape, attention_seconds

from ..errors import DoesNotFit, UsageError
from ..io.units import format_size
from .gpus import GpuPlan, close_gpus, open_gpus


class AttentionSeconds(NamedTuple):
    """Seconds for all attention of a step.

    Args:
        own: seconds of nntask's kernels; None if nothing was measured.
        cudnn: seconds of cuDNN; None if cuDNN does not compute all of it.
        why_not: reason why cuDNN does not; "" if it does.
    """

    own: float | None
    cudnn: float | None
    why_not: str


def gpus_with_cudnn(gpus: GpuPlan) -> GpuPlan:
    """Return the same GPUs with cuDNN for attention, with its workspace taken from the budget.

    Raises:
        UsageError: no GPU is used, or the frontend of cuDNN is not installed.
        DoesNotFit: no budget remains.
    """
    if not gpus.devices:
        raise UsageError(
            "is about GPUs, and none is used", "use --attention flash, or continue on a machine with a GPU", flag="--attention", value="cudnn"
        )
    if not _has_frontend():
        raise UsageError(
            "needs nvidia-cudnn-frontend, which is not installed",
            f"{INSTALL_CUDNN}, or begin a run with --attention flash",
            flag="--attention",
            value="cudnn",
        )
    left = gpus.nbytes - ATTENTION_WORKSPACE_NBYTES
    if left <= 0:
        raise DoesNotFit(
            f"takes {format_size(ATTENTION_WORKSPACE_NBYTES)} of each GPU's budget, and the budget is {format_size(gpus.nbytes)}",
            "raise --gpu-memory, or begin a run with --attention flash",
            flag="--attention",
            value="cudnn",
            shortage=scheduler.Shortage("reserve", gpus.names[0], ATTENTION_WORKSPACE_NBYTES, gpus.nbytes),
        )
    return replace(gpus, nbytes=left, has_cudnn=True)


def why_not_cudnn(gpus: GpuPlan) -> str:
    """Return why cuDNN cannot compute on GPUs, as far as that is known without opening them; "" if it can."""
    if not gpus.devices:
        return "no GPU is used"
    if not _has_frontend():
        return f"nvidia-cudnn-frontend is not installed ({INSTALL_CUDNN})"
    if gpus.nbytes <= ATTENTION_WORKSPACE_NBYTES:
        return f"cuDNN's workspace of {format_size(ATTENTION_WORKSPACE_NBYTES)} leaves nothing of --gpu-memory"
    return ""


def time_attention(gpus: GpuPlan, dtype: str, counts: Mapping[WholeShape, tuple[int, int]]) -> AttentionSeconds:
    """Measure the attention of nntask's kernels and of cuDNN on the first device of each kind of card; takes a second or two for each.

    Args:
        dtype: value of --dtype.
        counts: shape -> number of forward and of backward passes in a step.

    Raises:
        DoesNotFit, UsageError: `open_gpus` cannot open a card.
        DeviceFailed: a card stopped working.
    """
    kinds = {card.name: (card, part) for card, part in reversed(gpus.devices)}
    devices: list[Any] = list(open_gpus(replace(gpus, devices=tuple(kinds.values()), has_cudnn=False), dtype))
    own, cudnn, declined = 0.0, 0.0, list[str]()
    try:
        for device in devices:
            own += _seconds(device, counts)
            device.open_attention(declined.append)
            cudnn += _seconds(device, counts)
            if declined:
                return AttentionSeconds(own, None, declined[0])
    except scheduler.DeviceFailed:
        raise
    except (ImportError, MemoryError, RuntimeError, scheduler.DoesNotFit) as error:
        if isinstance(error, RuntimeError) and is_fatal(error):  # a fault of a kernel appears when the host waits for it
            raise device.failed(error) from error
        return AttentionSeconds(own or None, None, " ".join(str(error).split()))
    finally:
        close_gpus(devices)
    return AttentionSeconds(own, cudnn, "")


def _seconds(device: Any, counts: Mapping[WholeShape, tuple[int, int]]) -> float:
    found = ((count, attention_seconds(device, shape)) for shape, count in counts.items())
    return sum(forward * seconds[0] + backward * seconds[1] for (forward, backward), seconds in found)


def _has_frontend() -> bool:
    """Return whether the frontend of cuDNN can be imported, as far as that is known without importing it."""
    return sys.modules["cudnn"] is not None if "cudnn" in sys.modules else find_spec("cudnn") is not None
