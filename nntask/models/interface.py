"""What tiling, trainer and planner ask of a model's config, and no more. `registry` lists the configs that answer."""

from __future__ import annotations

from typing import Any, Protocol, Self


class ModelConfig(Protocol):
    """Shape of a model of blocks, each an attention and a feed-forward layer; a frozen dataclass with Hugging Face's field names.

    The letters are those of the models: V, P, C, H, D, I.
    """

    @property
    def model_type(self) -> str:
        """Hugging Face's name of the family, the key of `registry.FAMILIES`."""

    @property
    def positions_key(self) -> str:
        """How the family's JSON calls the longest sequence, for messages."""

    @property
    def vocab_size(self) -> int:
        """V: number of token ids."""

    @property
    def n_positions(self) -> int:
        """P: longest sequence."""

    @property
    def n_embd(self) -> int:
        """C: width of the residual stream."""

    @property
    def n_layer(self) -> int:
        """Number of blocks."""

    @property
    def n_head(self) -> int:
        """H: heads of queries."""

    @property
    def n_kv_head(self) -> int:
        """Heads of keys and values; divides n_head."""

    @property
    def head_size(self) -> int:
        """D: width of one head."""

    @property
    def inner_size(self) -> int:
        """I: width inside the feed-forward layer."""

    @property
    def num_inner_matrices(self) -> int:
        """Matrices (C, I) of one feed-forward layer, in either orientation."""

    @property
    def num_parameters(self) -> int:
        """Number of weights; a tied head counts once."""

    def with_dropout(self, p: float) -> Self:
        """The same config with every dropout probability `p`."""

    def with_layers(self, count: int) -> Self:
        """The same config with `count` blocks."""

    def to_dict(self) -> dict[str, Any]:
        """Values as Hugging Face's JSON has them, with the model_type."""
