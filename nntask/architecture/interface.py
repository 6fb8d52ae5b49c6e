"""Interface of model configs: the properties that a run needs of any language model.

Models with tiles have configs derived from `family_config.ModelConfig`. Models without tiles come from other packages, with configs of their own.
"""

from __future__ import annotations

from typing import Any, Protocol


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
