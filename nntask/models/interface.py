"""Interfaces of model configs: the properties that a run needs of any language model, and those that tiling and planning need of a model with tiles.

`registry` lists the families whose models have tiles. Models without tiles come from other packages, with configs of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from .description import Description
    from .names import Names


class LanguageConfig(Protocol):
    """Config of a language model: the properties that its data, its settings and its checkpoints need."""

    @property
    def model_type(self) -> str:
        """Hugging Face's name of the family."""

    @property
    def positions_key(self) -> str:
        """Key of the longest sequence in the family's JSON, for error messages."""

    @property
    def vocab_size(self) -> int:
        """V: number of token ids."""

    @property
    def n_positions(self) -> int:
        """P: longest sequence; the usual length for a model without a limit."""

    @property
    def longest(self) -> int | None:
        """Largest number of tokens of a sequence; None for no limit."""

    @property
    def num_parameters(self) -> int:
        """Number of weights; a tied head counts once."""

    def to_dict(self) -> dict[str, Any]:
        """Return the config as Hugging Face's JSON object, with its model_type."""


class ModelConfig(LanguageConfig, Protocol):
    """Shape of a model of blocks with an attention and a feed-forward layer each; implementations are frozen dataclasses with Hugging Face's fields.

    Letters: V vocabulary, P longest sequence, C width of the residual stream, H heads, D width of a head, I width of the feed-forward layer.
    """

    @property
    def n_embd(self) -> int:
        """C: width of the residual stream."""

    @property
    def n_layer(self) -> int:
        """Number of blocks."""

    @property
    def n_head(self) -> int:
        """H: number of heads of queries."""

    @property
    def n_kv_head(self) -> int:
        """Number of heads of keys and values; divides n_head."""

    @property
    def head_size(self) -> int:
        """D: width of one head."""

    @property
    def inner_size(self) -> int:
        """I: width inside the feed-forward layer."""

    @property
    def num_inner_matrices(self) -> int:
        """Number of matrices (C, I) or (I, C) in one feed-forward layer."""

    @property
    def objective(self) -> str:
        """Default objective of training: causal, masked, seq2seq or classify."""

    @property
    def num_labels(self) -> int:
        """Number of classes of a classifier; 0 for other models."""

    @property
    def description(self) -> Description:
        """Parts of the model."""

    @property
    def ties_head(self) -> bool:
        """Whether the head is the token embedding."""

    @property
    def names(self) -> Names:
        """Names and layouts of the model's weights in files."""

    def with_dropout(self, p: float) -> Self:
        """Return the same config with every dropout probability `p`."""

    def with_layers(self, count: int) -> Self:
        """Return the same config with `count` blocks."""
