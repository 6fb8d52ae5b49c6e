"""Modules of timm and torchvision for the sweep: the smallest of each kind, or one made smaller by its constructor's arguments."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn
from trial import STEPS, Trial, made

ROWS: Final = 4
CLASSES: Final = 10
SIZES: Final = (64, 96, 128, 224)
"""Heights of images that are tried."""

_LISTS: Final = tomllib.loads((Path(__file__).parent / "vision.toml").read_text(encoding="utf-8"))
_TIMM: Final[Mapping[str, Mapping[str, Any]]] = {**dict.fromkeys(_LISTS["timm"]["names"], MappingProxyType({})), **_LISTS["timm"]["smaller"]}
TIMM: Final = tuple(_TIMM)
"""Names of timm's registry."""


def _smaller() -> dict[str, Callable[[], nn.Module]]:
    """Modules of torchvision that are made small by their constructors, and its operations."""
    from torchvision import models, ops
    from torchvision.models.convnext import CNBlockConfig
    from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformerBlockV2

    swin: dict[str, Any] = {
        "patch_size": [4, 4],
        "embed_dim": 24,
        "depths": [1, 1],
        "num_heads": [2, 2],
        "window_size": [4, 4],
        "num_classes": CLASSES,
    }
    second = {"block": SwinTransformerBlockV2, "downsample_layer": PatchMergingV2}
    blocks = [CNBlockConfig(16, 32, 1), CNBlockConfig(32, 48, 1), CNBlockConfig(48, None, 1)]

    def mean() -> nn.Module:
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())

    return {
        "convnext": lambda: models.ConvNeXt(blocks, num_classes=CLASSES),
        "maxvit": lambda: models.MaxVit((64, 64), 16, 2, [16, 32], [1, 1], 16, 0.0, num_classes=CLASSES),
        "vision_transformer": lambda: models.VisionTransformer(64, 16, 2, 2, 48, 96, num_classes=CLASSES),
        "swin_transformer": lambda: models.SwinTransformer(**swin),
        "swin_transformer_v2": lambda: models.SwinTransformer(**swin, **second),
        "vgg": lambda: nn.Sequential(models.vgg.make_layers([16, "M", 32, "M", 32, "M"], batch_norm=True), mean()),
        "fpn": lambda: nn.Sequential(nn.Conv2d(3, 16, 3), _Pyramid(ops.FeaturePyramidNetwork([16, 16], 16))),
        "mlp": lambda: nn.Sequential(nn.Flatten(), ops.MLP(3 * 64 * 64, [32, CLASSES], norm_layer=nn.LayerNorm)),
        "squeeze_excitation": lambda: nn.Sequential(nn.Conv2d(3, 16, 3), ops.SqueezeExcitation(16, 4), mean()),
        "frozen_batch_norm": lambda: nn.Sequential(nn.Conv2d(3, 16, 3), ops.FrozenBatchNorm2d(16), mean()),
        "conv_norm_activation": lambda: nn.Sequential(ops.Conv2dNormActivation(3, 16), ops.Permute([0, 2, 3, 1]), nn.LayerNorm(16), _Last()),
    }


def torchvision_cases() -> list[str]:
    """Names of torchvision's registry, and of modules that are made small."""
    return [*_smaller(), *_LISTS["torchvision"]["names"]]


def _torchvision(name: str) -> Callable[[], nn.Module]:
    """Function that makes a module of torchvision."""
    import torchvision

    small = _smaller()
    if name in small:
        return small[name]
    given = {"weights_backbone": None} if name.startswith(("lraspp", "deeplab", "fcn")) else {}
    if name in ("googlenet", "inception_v3"):
        given = {"aux_logits": False, "init_weights": True}
    return lambda: torchvision.models.get_model(name, weights=None, num_classes=CLASSES, **given)


class _Last(nn.Module):
    """Mean over all axes but the first and the last."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (B, C) of (B, H, W, C)."""
        return x.mean((1, 2))


class _Pyramid(nn.Module):
    """A pyramid of two resolutions of one image."""

    def __init__(self, pyramid: nn.Module) -> None:
        super().__init__()
        self.pyramid = pyramid

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean of the coarsest level, (B, C)."""
        levels = self.pyramid({"fine": x, "coarse": nn.functional.avg_pool2d(x, 2)})
        return sum(level.mean((2, 3)) for level in levels.values())


def cross_entropy(result: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """Loss of a classifier whose result is logits, several of them, or a dictionary of maps."""
    logits = result["out"].mean((2, 3)) if isinstance(result, Mapping) else result
    many = logits if isinstance(logits, tuple | list) else [logits]
    return sum(nn.functional.cross_entropy(each.flatten(2).mean(2) if each.dim() > 2 else each, batch["target"]) for each in many)


class _Classifier(nn.Module):
    """A module of one image that ignores the target, which the loss reads from the batch."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, target: torch.Tensor | None = None) -> Any:
        """Return what the inner module makes of the images."""
        return self.inner(x)


def _trial(make: Callable[[int], nn.Module]) -> Trial:
    """A trial of a module at the smallest image that it takes.

    Args:
        make: function from the height of an image to the module.

    Raises:
        Exception: what the module raises at the smallest image if it takes none.
    """
    first: Exception | None = None
    for size in SIZES:
        trial = Trial(lambda size=size: _Classifier(make(size)), _batches(size), cross_entropy, f"{ROWS} images of {size} x {size}")
        try:
            module = made(trial)
            cross_entropy(module(**trial.batches[0]), trial.batches[0]).backward()
        except Exception as error:
            first = first or error
        else:
            return trial
    assert first is not None
    raise first


def _batches(size: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        {"x": torch.randn(ROWS, 3, size, size, generator=generator), "target": torch.randint(0, CLASSES, (ROWS,), generator=generator)}
        for _ in range(STEPS)
    ]


def of_torchvision(name: str) -> Trial:
    """The trial of a module of torchvision."""
    maker = _torchvision(name)
    return _trial(lambda size: maker())


def of_timm(name: str) -> Trial:
    """The trial of a module of timm."""
    import timm

    options = dict(_TIMM[name])
    try:
        timm.create_model(name, num_classes=CLASSES, img_size=SIZES[0], **options)
    except TypeError:  # any size will do
        return _trial(lambda size: timm.create_model(name, num_classes=CLASSES, **options))
    except Exception:  # not this size
        pass
    return _trial(lambda size: timm.create_model(name, num_classes=CLASSES, img_size=size, **options))
