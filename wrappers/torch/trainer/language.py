"""Language models of transformers that nntask has no tiles for: their kind, config and module.

The kind follows from transformers' own tables. An encoder with a decoder writes the second half of a sequence from the first. For other models, the
class that the config names under `architectures` decides. If it names none of these classes, the model fills in masked tokens if its family can. In
a family that can do both, a model is causal only as a decoder (`is_decoder`); otherwise each token attends to those after it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from nntask import UsageError
from nntask.io import LARGEST

from ..steps.weights import empty_parameters
from ..tasks.calls import recomputing

Kind = Literal["causal", "masked", "pairs"]
"""Training task of a model: the next token, masked tokens, or the second half of a sequence from the first."""

TITLES: Final[Mapping[Kind, str]] = {
    "causal": "causal language model",
    "masked": "masked language model",
    "pairs": "sequence to sequence: the second half of each sequence from the first",
}
_LOADERS: Final[Mapping[Kind, tuple[str, Any]]] = {
    "causal": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", transformers.AutoModelForCausalLM),
    "masked": ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", transformers.AutoModelForMaskedLM),
    "pairs": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", transformers.AutoModelForSeq2SeqLM),
}
USUAL_LENGTH: Final = 512
"""Default number of tokens in a sequence for a model without a limit."""


@dataclass(frozen=True)
class LanguageModelConfig:
    """The config of a model of transformers, as a `LanguageConfig` of nntask.

    Attributes:
        inner: transformers' config.
        kind: training task of the model.
        positions_key: name of the config's entry for the largest number of positions.
    """

    inner: Any
    kind: Kind
    positions_key: str = "max_position_embeddings"

    @property
    def model_type(self) -> str:
        """Hugging Face's name of the family."""
        return str(self.inner.model_type)

    @property
    def vocab_size(self) -> int:
        """V: number of token ids."""
        return int(self.inner.get_text_config().vocab_size)

    @property
    def longest(self) -> int | None:
        """Largest number of tokens in a sequence; None if the model has no limit."""
        limit = getattr(self.inner.get_text_config(), self.positions_key, None)
        if limit is None:
            return None
        for name, child in self.module.named_modules():  # positions of RoBERTa begin after that of padding
            if name.endswith("position_embeddings") and getattr(child, "padding_idx", None) is not None:
                limit = min(limit, child.num_embeddings - child.padding_idx - 1)
        return int(limit) * (2 if self.kind == "pairs" else 1)

    @property
    def n_positions(self) -> int:
        """Largest number P of positions in a sequence."""
        return self.longest or LARGEST

    @property
    def num_parameters(self) -> int:
        """Number of weights; a tied head counts once."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    @cached_property
    def module(self) -> torch.nn.Module:
        """Module of the config whose parameters have no memory."""
        return self.make()

    def make(self) -> torch.nn.Module:
        """Return a new module in training mode, whose parameters have no memory."""
        with empty_parameters():
            module: torch.nn.Module = _LOADERS[self.kind][1].from_config(self.inner, dtype=torch.float32)
        return module.train()

    def recompute_blocks(self) -> None:
        """Make the module keep only the input of each block, and recompute the rest in the backward pass.

        Raises:
            UsageError: the family does not support that.
        """
        if not self.module.supports_gradient_checkpointing:
            raise UsageError(f"--recompute block is not implemented by transformers for {self.model_type}", "drop it, or add --disk DIR")
        self.module.activation_checkpointing_enable({"use_reentrant": False, "context_fn": lambda: (nullcontext(), recomputing())})

    def to_dict(self) -> dict[str, Any]:
        """Return the config as Hugging Face's JSON object, with its model_type and the class of the module."""
        values: dict[str, Any] = json.loads(self.inner.to_json_string())
        return {**values, "architectures": [type(self.module).__name__]}


def language_config(values: Mapping[str, Any], source: str, dropout: float | None = None) -> LanguageModelConfig:
    """Return the config of a language model.

    Args:
        values: content of a config.json, with a model_type.
        source: name of the file with `values`, for messages.
        dropout: probability for all dropouts; None for those of the config.

    Raises:
        UsageError: transformers does not know the family or refuses the values, or the model is not a language model.
    """
    model_type = values["model_type"]
    if model_type not in CONFIG_MAPPING:
        raise UsageError(
            f"model_type in {source} is {json.dumps(model_type)}, which neither nntask nor transformers {transformers.__version__} knows",
            "use a newer transformers, or train its module in a program with wrappers.torch.Session",
        )
    try:
        inner = CONFIG_MAPPING[model_type].from_dict({name: value for name, value in values.items() if name != "auto_map"})  # no foreign code
    except Exception as error:  # its type depends on the family
        raise _refused(error, model_type, source) from None
    kind = _kind_of(inner, source)
    if dropout is not None:
        _set_dropout(inner, dropout)
    config = LanguageModelConfig(inner, kind)
    try:
        _ = config.module  # families check some values only here
    except Exception as error:  # its type depends on the family
        raise _refused(error, model_type, source) from None
    return config


def _refused(error: Exception, model_type: str, source: str) -> UsageError:
    """Return an error with transformers' complaint about a config, in one sentence."""
    return UsageError(f"{source} is no config of a {model_type}: {' '.join(str(error).split())}", "copy it again")


def _kind_of(inner: Any, source: str) -> Kind:
    """Return the training task of a model with this config.

    Raises:
        UsageError: it is not a language model.
    """
    model_type = inner.model_type
    classes: dict[Kind, str] = {kind: name for kind, (table, _) in _LOADERS.items() if (name := getattr(modeling_auto, table).get(model_type))}
    named = list(inner.architectures or ())
    usual: tuple[Kind, ...] = ("pairs",) if inner.is_encoder_decoder else ("masked", "causal")
    if "masked" in classes and getattr(inner, "is_decoder", None) is False:  # it sees the later tokens that a causal model must predict
        usual = tuple(kind for kind in usual if kind != "causal")
    known = [kind for kind in usual if kind in classes]
    matching = [kind for kind in known if classes[kind] in named] or known
    if not matching:
        what = f"{model_type}{f' ({named[0]})' if named else ''}"
        raise UsageError(
            f"model_type in {source} is {what}, and models that nntask trains through PyTorch are causal, masked or sequence-to-sequence language "
            "models of transformers",
            "train it in a program with wrappers.torch.Session, or wrappers.torch.Trainer",
        )
    return matching[0]


def _set_dropout(inner: Any, dropout: float) -> None:
    """Set every probability of dropping an element, but not those of dropping whole layers.

    Raises:
        UsageError: the config has no dropouts.
    """
    text = inner.get_text_config()
    names = [name for name, value in text.to_dict().items() if ("dropout" in name or name.endswith("pdrop")) and type(value) in (int, float)]
    if not names:
        raise UsageError(f"is for dropouts of the config, and that of this {inner.model_type} has none", "drop it", flag="--dropout", value=dropout)
    for name in names:
        setattr(text, name, dropout)
