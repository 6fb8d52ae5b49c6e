"""Phi 3 to 4 (Abdin et al., 2024), with the semantics of transformers' ``Phi3ForCausalLM``: a LLaMA with dropout after its layers.

A part of each head may be rotated, at frequencies scaled by LongRoPE. Files store q, k and v as rows of one matrix, and gate and up as rows of
another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from ..architecture.config_checks import count, positive, probability, token
from ..architecture.description import BlockShape
from ..architecture.foreign_keys import Rules, ignored, off, only
from ..architecture.names import Joined, Names
from ..architecture.rotary_config import PartialRotaryConfig
from ..errors import UsageError
from .llama import NAMES, GatedConfig

_JOINED: Final = ("q", "k", "v", "gate", "up")
_ORIGINAL, _ORIGINAL_LENGTH = "original_max_position_embeddings", 4096
"""Key of the original length, and transformers' default."""
_OLD_TYPES: Final = ("su", "yarn")
"""Names of "longrope" in older files of the family."""


@dataclass(frozen=True, kw_only=True)
class Phi3Config(GatedConfig, PartialRotaryConfig):
    """Shape and hyperparameters of a Phi 3; field names and meaning as in ``transformers.Phi3Config``, further fields in the base classes.

    Args:
        partial_rotary_factor: rotated part of each head.
        resid_pdrop: dropout probability after each layer.
        sliding_window: number of tokens that a token attends to, itself included; None for all.
        pad_token_id: id of padding; transformers assumes 32000 for files without the key.
    """

    partial_rotary_factor: float = positive(1.0, 1.0)
    rms_norm_eps: float = positive(1e-5, 1e-5)
    resid_pdrop: float = probability(0.0)
    sliding_window: int | None = count(2047, None)
    pad_token_id: int | None = token(None)

    model_type: ClassVar[str] = "phi3"
    title: ClassVar[str] = "Phi 3"
    architecture: ClassVar[str] = "Phi3ForCausalLM"
    dropouts: ClassVar[tuple[str, ...]] = ("resid_pdrop", "attention_dropout")
    foreign: ClassVar[Rules] = {
        **off("use the config of a Phi 3 without biases", "attention_bias mlp_bias lm_head_bias"),
        **only((1, None), "use the config of a Phi 3 whose blocks are alike", "full_attn_mod interpolate_factor"),
        **ignored("no version of the model reads it", "embd_pdrop"),
    }
    names: ClassVar[Names] = replace(
        NAMES,
        modules={attribute: name for attribute, name in NAMES.modules.items() if attribute not in _JOINED},
        joined=(
            Joined(members=("q", "k", "v"), whole="qkv_proj", axis=0, by_groups=True),
            Joined(members=("gate", "up"), whole="gate_up_proj", axis=0),
        ),
    )

    @classmethod
    def read(cls, values: Mapping[str, Any], source: str) -> dict[str, Any]:
        """Read values, also with older names of "longrope". The original length must be next to the scaling, as transformers reads it only there."""
        taken = dict(values)
        for key in ("rope_parameters", "rope_scaling"):
            if not isinstance(scaling := taken.get(key), Mapping):
                continue
            kind = scaling.get("rope_type", scaling.get("type", "default"))
            if kind in _OLD_TYPES and "long_factor" in scaling:
                kind = "longrope"
                taken[key] = {**{name: value for name, value in scaling.items() if name != "type"}, "rope_type": kind}
            if kind == "longrope" and values.get(_ORIGINAL) is None:
                if (inside := scaling.get(_ORIGINAL, _ORIGINAL_LENGTH)) != _ORIGINAL_LENGTH:
                    raise UsageError(
                        f"{_ORIGINAL} of a Phi 3 in {source} must be next to {key}, because transformers assumes {_ORIGINAL_LENGTH} otherwise, got "
                        f"{inside} inside {key}",
                        "move it out",
                    )
                taken[_ORIGINAL] = _ORIGINAL_LENGTH
        return super().read(taken, source)

    @classmethod
    def _check(cls, values: dict[str, Any], source: str) -> None:
        """Check that a scaling is LongRoPE, the only one of a Phi 3."""
        super()._check(values, source)
        if (scaling := values.get("rope_scaling")) is not None and scaling.rope_type != "longrope":
            raise UsageError(f'rope_type of a Phi 3 in {source} must be "default" or "longrope", got "{scaling.rope_type}"', "use one of them")

    def to_dict(self) -> dict[str, Any]:
        """Return the config as Hugging Face's JSON object.

        LongRoPE has only the keys that transformers 4 accepts, plus `factor` if it does not follow from the lengths.
        """
        values, scaling = super().to_dict(), self.rope_scaling
        if scaling is None or (original := scaling.original_max_position_embeddings) is None:
            return values
        longrope = {"type": "longrope", **scaling.to_dict()}
        for key in ("rope_type", _ORIGINAL, *(["factor"] if scaling.factor == max(1.0, self.max_position_embeddings / original) else [])):
            del longrope[key]
        others = {key: values["rope_parameters"][key] for key in ("rope_theta", "partial_rotary_factor")}
        return {**values, _ORIGINAL: original, "rope_scaling": longrope, "rope_parameters": {**longrope, **others}}

    def block(self, layer: int) -> BlockShape:
        """Return the parts of one block, layer from 0."""
        return replace(super().block(layer), dropout=self.resid_pdrop)


PRESETS: Final[Mapping[str, Phi3Config]] = {
    "phi3-mini": Phi3Config.of_size(32064, 3072, 8192, 32, 32, 4096, sliding_window=2047),
}
"""Name -> config: Phi 3 mini with 4,096 tokens."""
