"""What the libraries of the sweep need before they are imported."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, Final

_OPERATORS: Final = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_kept: list[Any] = []


def prepare() -> None:
    """Import torchvision if it is installed.

    A torchvision that was built for CUDA cannot load its operators beside a torch without CUDA, and then fails to import for want of the declarations
    of two of them. They are declared here without kernels; models that call them do not train in eager PyTorch either.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    import torch

    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        declared = torch.library.Library("torchvision", "FRAGMENT")
        for operator in _OPERATORS:
            declared.define(operator)
        _kept.append(declared)
        importlib.import_module("torchvision")
