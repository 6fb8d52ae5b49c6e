"""The interfaces of model configs: what a run needs of any language model, and what tiling and planning need of one that is made of tiles besides.

`registry` lists the classes of the latter. Models without tiles come from other packages, with configs of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from .description import Description
    from .names import Names


class LanguageConfig(Protocol):
    """A language model as its data, its settings and its checkpoints see it."""

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
        """P: longest sequence, or where there is no limit the usual one."""

    @property
    def longest(self) -> int | None:
        """Most tokens of a sequence; None for no limit."""

    @property
    def num_parameters(self) -> int:
        """Number of weights; a tied head counts once."""

    def to_dict(self) -> dict[str, Any]:
        """The config as Hugging Face's JSON object, with its model_type."""


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
        """What the model learns unless told: causal, masked, seq2seq or classify."""

    @property
    def num_labels(self) -> int:
        """Classes of a classifier; 0 of other models."""

    @property
    def description(self) -> Description:
        """The parts of the model."""

    @property
    def ties_head(self) -> bool:
        """Whether the head is the token embedding."""

    @property
    def names(self) -> Names:
        """Names and layouts of its weights in files."""

    def with_dropout(self, p: float) -> Self:
        """The same config with every dropout probability `p`."""

    def with_layers(self, count: int) -> Self:
        """The same config with `count` blocks."""
