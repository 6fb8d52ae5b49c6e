"""MLP-Mixer (Tolstikhin et al., 2021): feed-forward layers that mix, in turn, the patches of an image and the features of each patch.

Letters::

    B  images of a minibatch    N  patches of an image         C  width of the residual stream
    P  values of a patch        S  width between patches       I  width between features

Weights have the names of timm's ``MlpMixer``. Its convolution of patches is the matrix `stem` here: (C, channels, p, p) with its axes in the order
(0, 2, 3, 1) is (C, p * p * channels), since patches are rows of pixels with adjacent channels (`nntask.data.images`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NoReturn

import numpy as np
import numpy.typing as npt

from scheduler import TaskRuntime
from tiles import TileTensor

from ..architecture.config_checks import ACTIVATIONS, check_divisible, choice, classes, count, depth, positive, probability
from ..architecture.family_config import KeyedConfig
from ..architecture.names import Names
from ..errors import UsageError
from ..nn import functional
from ..nn.autograd import Tensor
from ..nn.functional import Masks
from ..nn.initializers import constant, normal
from ..nn.layers import Dropout, LayerNorm, Linear
from ..nn.module import Module, Parameter
from ..tiling.model_tiling import ModelTiling
from .language import LanguageModel


@dataclass(frozen=True, kw_only=True)
class MlpMixerConfig(KeyedConfig):
    """Shape and hyperparameters of an MLP-Mixer.

    Args:
        image_size: number of pixels of a side.
        patch_size: p, number of pixels of a side of a patch; divides image_size.
        num_channels: number of values of a pixel.
        hidden_size: C.
        num_hidden_layers: number of blocks.
        tokens_mlp_dim: S.
        channels_mlp_dim: I.
        num_labels: number of classes.
        hidden_act: one of `ACTIVATIONS`.
        hidden_dropout_prob: dropout probability after each feed-forward layer.
        layer_norm_eps: term added to the variance.
        initializer_range: standard deviation of initial weights.
    """

    image_size: int = count(224)
    patch_size: int = count(16)
    hidden_size: int = count(512)
    num_hidden_layers: int = depth(8)
    tokens_mlp_dim: int = count(256)
    channels_mlp_dim: int = count(2048)
    num_labels: int = classes(1000, 1000)
    num_channels: int = count(3, 3)
    hidden_act: str = choice(ACTIVATIONS, "gelu")
    hidden_dropout_prob: float = probability(0.0)
    layer_norm_eps: float = positive(1e-6, 1e-6)
    initializer_range: float = positive(0.02, 0.02)

    model_type: ClassVar[str] = "mlp_mixer"
    title: ClassVar[str] = "MLP-Mixer"
    architecture: ClassVar[str] = "MlpMixer"
    positions_key: ClassVar[str] = "(image_size / patch_size)^2"
    inner_key: ClassVar[str] = "channels_mlp_dim"
    dropouts: ClassVar[tuple[str, ...]] = ("hidden_dropout_prob",)
    objective: ClassVar[str] = "classify"
    objectives: ClassVar[tuple[str, ...]] = ("classify",)
    ties_head: ClassVar[bool] = False
    n_head: ClassVar[int] = 1
    names: ClassVar[Names] = Names(modules={"stem": "stem.proj"}, prefix="", embedding="", head="head.weight", outside={"head_bias": "head.bias"})

    @classmethod
    def check_together(cls, values: Mapping[str, Any], source: str) -> None:
        """Check that patches fill the image."""
        check_divisible("image_size", values["image_size"], "patch_size", values["patch_size"], source)

    @property
    def n_positions(self) -> int:
        """N: number of patches of an image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def patch_width(self) -> int:
        """P: number of values of a patch."""
        return self.patch_size**2 * self.num_channels

    @property
    def vocab_size(self) -> int:
        """Number of classes, the size of the head."""
        return self.num_labels

    @property
    def num_parameters(self) -> int:
        """Number of weights."""
        width, mixed = self.hidden_size, self.tokens_mlp_dim
        patches = 2 * self.n_positions * mixed + mixed + self.n_positions
        features = 2 * width * self.channels_mlp_dim + self.channels_mlp_dim + width
        ends = (self.patch_width + 1) * width + 2 * width + (width + 1) * self.num_labels
        return self.num_hidden_layers * (patches + features + 4 * width) + ends

    @property
    def products_per_sequence(self) -> int:
        """Number of multiplications in a forward pass over one image."""
        block = 2 * self.n_positions * self.hidden_size * (self.tokens_mlp_dim + self.channels_mlp_dim)
        return self.num_hidden_layers * block + self.hidden_size * (self.n_positions * self.patch_width + self.num_labels)


class MixerMlp(Module):
    """Feed-forward layer over the last axis: (.., K) -> (.., K)."""

    def __init__(self, width: int, inner: int, tile: tuple[int, int], std: float, activation: str) -> None:
        self.fc1 = Linear(width, inner, tile, std=std, activation=activation, has_rows_in=False)
        self.fc2 = Linear(inner, width, tile[::-1], std=std, has_rows_in=False)

    def __call__(self, x: Tensor, masks: Masks | None) -> Tensor:
        """(.., K) -> (.., K)."""
        return self.fc2(self.fc1(x, masks), masks)  # activation((.., K) @ (I, K)^T) @ (K, I)^T -> (.., K)


class MixerBlock(Module):
    """x + mix of positions, then x + mix of features: (B, N, C) -> (B, N, C)."""

    def __init__(self, config: MlpMixerConfig, cut: ModelTiling, layer: int) -> None:
        width, patches, std, activation = config.hidden_size, config.n_positions, config.initializer_range, ACTIVATIONS[config.hidden_act]
        self.norm1 = LayerNorm(width, cut.embd_tile, config.layer_norm_eps)
        self.mlp_tokens = MixerMlp(patches, config.tokens_mlp_dim, (cut.seq_tile, min(cut.inner_tile, config.tokens_mlp_dim)), std, activation)
        self.norm2 = LayerNorm(width, cut.embd_tile, config.layer_norm_eps)
        self.mlp_channels = MixerMlp(width, config.channels_mlp_dim, (cut.embd_tile, cut.inner_tile), std, activation)
        self.dropouts = [Dropout(config.hidden_dropout_prob, 2 * layer + number) for number in range(2)]

    def __call__(self, x: Tensor, masks: Masks | None) -> Tensor:
        """(B, N, C) -> (B, N, C)."""
        mixed = functional.swapped(self.mlp_tokens(functional.swapped(self.norm1(x)), masks))  # (B, C, N) @ (S, N)^T @ (N, S)^T -> (B, N, C)
        x, h = self.norm2.after_add(x, self.dropouts[0](mixed, masks))
        del mixed
        return x + self.dropouts[1](self.mlp_channels(h, masks), masks)


class MlpMixer(LanguageModel):
    """An MLP-Mixer on a runtime, with the arguments of `Transformer`, whose attention it lacks. Its tokens are patches, which have no ids."""

    takes = ()

    def __init__(
        self,
        config: MlpMixerConfig,
        tiling: ModelTiling,
        runtime: TaskRuntime,
        *,
        dtype: npt.DTypeLike = np.float32,
        seed: int | None = 0,
        flash: bool = True,
        library: bool = False,
    ) -> None:
        super().__init__(config, tiling, runtime)
        self.names = config.names.modules
        cut = tiling.resolve(config, 1 << 62, config.n_positions)
        width, std = config.hidden_size, config.initializer_range
        self.stem = Linear(config.patch_width, width, (-1, cut.embd_tile), std=std, has_rows_in=False)
        self.blocks = [MixerBlock(config, cut, layer) for layer in range(config.num_hidden_layers)]
        self.norm = LayerNorm(width, cut.embd_tile, config.layer_norm_eps)
        self.lm_head = Parameter((config.num_labels, width), (cut.vocab_tile, cut.embd_tile), normal(std))
        self.head_bias = Parameter((config.num_labels,), (cut.vocab_tile,), constant(0.0))
        self.allocate(runtime, dtype, seed)

    def inputs(
        self, batch: int, seq_len: int | None = None, names: Sequence[str] = ("images", "targets"), target_len: int | None = None
    ) -> dict[str, TileTensor]:
        """Return images (B, N, P) fp32 and targets (B, 1) int32, with the arguments of `LanguageModel.inputs`.

        Raises:
            UsageError: the batch is empty, the images have another number of patches, or other arrays are asked for.
        """
        config: Any = self.config
        if batch < 1 or seq_len not in (None, config.n_positions) or not set(names) <= {"images", "targets"}:
            raise UsageError(
                f"an MLP-Mixer takes images and targets of at least 1 image of {config.n_positions} patches, got {', '.join(names)} of "
                f"{batch} images of {seq_len}",
                "leave --seq-len out, and use --dataset images",
            )
        sizes = {"images": ((batch, config.n_positions, config.patch_width), np.float32), "targets": ((batch, 1), np.int32)}
        tile = (self.given_tiling.minibatch_tile, self.given_tiling.seq_tile, -1)
        return {
            name: TileTensor(self.runtime, sizes[name][0], tile[: len(sizes[name][0])], sizes[name][1], kind="input", data_class="data", name=name)
            for name in names
        }

    def __call__(  # type: ignore[override]
        self, images: TileTensor, targets: TileTensor, *, reduction: str = "mean", scale: float = 1.0, share: float = 1.0, minibatch: int = 0
    ) -> Tensor:
        """Return the loss of predicting the classes of images.

        Args:
            images: (B, N, P) fp32.
            targets: (B, 1) int32.
            reduction, scale, share, minibatch: the same as for `LanguageModel`.

        Returns:
            (1,), the loss.
        """
        masks = Masks(self.dropout_key, minibatch) if self.training else None
        if reduction == "mean":
            scale /= targets.shape[0]
        return functional.linear_cross_entropy(self.features(images, masks), self.lm_head, targets, scale=scale, bias=self.head_bias)

    def features(self, images: TileTensor, masks: Masks | None = None) -> Tensor:
        """Return the features for the head: (B, N, P) -> (B, 1, C)."""
        x = self.stem(functional.cast(Tensor(images), self.stem.weight.dtype))  # (B, N, P) @ (C, P)^T -> (B, N, C)
        for block in self.blocks:
            with x.data.runtime.block():
                x = block(x, masks)
        return functional.mean_tokens(self.norm(x))  # (B, N, C) -> (B, 1, C)

    def class_scores(self, images: TileTensor) -> Tensor:
        """Return the scores of the classes: (B, N, P) -> (B, 1, classes)."""
        return self.scores(self.features(images))

    def hidden(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: an MLP-Mixer has no tokens to score or to continue.

        Raises:
            UsageError: always.
        """
        raise UsageError("an MLP-Mixer classifies images and has no tokens", "use its class_scores, or a language model")

    trunk = encode = hidden


PRESETS: Final[Mapping[str, MlpMixerConfig]] = {
    "mixer-tiny": MlpMixerConfig(
        image_size=8, patch_size=2, num_channels=1, hidden_size=64, num_hidden_layers=4, tokens_mlp_dim=32, channels_mlp_dim=256, num_labels=10
    ),
    "mixer-s16": MlpMixerConfig(
        image_size=224, patch_size=16, hidden_size=512, num_hidden_layers=8, tokens_mlp_dim=256, channels_mlp_dim=2048, num_labels=1000
    ),
    "mixer-b16": MlpMixerConfig(
        image_size=224, patch_size=16, hidden_size=768, num_hidden_layers=12, tokens_mlp_dim=384, channels_mlp_dim=3072, num_labels=1000
    ),
}
"""Name -> config: one for images of 8 x 8 pixels, and S/16 and B/16 of the paper."""
