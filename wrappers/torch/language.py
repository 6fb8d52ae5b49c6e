"""Language models of transformers that nntask has no tiles for: which of three kinds one is, its config, and its module.

Which kind follows from transformers' own tables. An encoder with a decoder writes the second half of a sequence from the first. Otherwise the class
that the config names under `architectures` decides, and where it names none of these classes, the model fills in masked tokens if its family can. Of
a family that can do both, a model is causal only as a decoder (`is_decoder`): else each token sees those that follow it.
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
from nntask.config import LARGEST

from .recomputation import making_again
from .weights import empty_parameters

Kind = Literal["causal", "masked", "pairs"]
"""What a model learns: the next token, masked tokens, or the second half of a sequence from the first."""

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
"""Tokens of a sequence of a model without a longest one, where none is asked for."""


@dataclass(frozen=True)
class LanguageModelConfig:
    """The config of a model of transformers, as a `LanguageConfig` of nntask.

    Attributes:
        inner: transformers' config.
        kind: what the model learns.
        positions_key: see `LanguageConfig`.
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
        """Most tokens of a sequence; None where the model has no limit."""
        limit = getattr(self.inner.get_text_config(), self.positions_key, None)
        if limit is None:
            return None
        for name, child in self.module.named_modules():  # positions of RoBERTa begin behind the one of padding
            if name.endswith("position_embeddings") and getattr(child, "padding_idx", None) is not None:
                limit = min(limit, child.num_embeddings - child.padding_idx - 1)
        return int(limit) * (2 if self.kind == "pairs" else 1)

    @property
    def n_positions(self) -> int:
        """P: longest sequence."""
        return self.longest or LARGEST

    @property
    def num_parameters(self) -> int:
        """Number of weights; a tied head counts once."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    @cached_property
    def module(self) -> torch.nn.Module:
        """A module of the config whose parameters have no memory."""
        return self.make()

    def make(self) -> torch.nn.Module:
        """A new module in training mode, whose parameters have no memory."""
        with empty_parameters():
            module: torch.nn.Module = _LOADERS[self.kind][1].from_config(self.inner, dtype=torch.float32)
        return module.train()

    def recompute_blocks(self) -> None:
        """Let the module keep only the input of each block, and compute the rest again in the backward pass.

        Raises:
            UsageError: the family cannot.
        """
        if not self.module.supports_gradient_checkpointing:
            raise UsageError(f"--recompute block is not implemented by transformers for {self.model_type}; drop it, or add --disk DIR")
        self.module.activation_checkpointing_enable({"use_reentrant": False, "context_fn": lambda: (nullcontext(), making_again())})

    def to_dict(self) -> dict[str, Any]:
        """The config as Hugging Face's JSON object, with its model_type and the class of the module."""
        values: dict[str, Any] = json.loads(self.inner.to_json_string())
        return {**values, "architectures": [type(self.module).__name__]}


def language_config(values: Mapping[str, Any], source: str, dropout: float | None = None) -> LanguageModelConfig:
    """The config of a language model.

    Args:
        values: content of a config.json, with a model_type.
        source: where they are from, for messages.
        dropout: probability for all dropouts; None for those of the config.

    Raises:
        UsageError: transformers does not know the family, refuses the values, or the model is no language model.
    """
    model_type = values["model_type"]
    if model_type not in CONFIG_MAPPING:
        raise UsageError(
            f"model_type in {source} is {json.dumps(model_type)}, which neither nntask nor transformers {transformers.__version__} knows; "
            "use a newer transformers, or train its module in a program with wrappers.torch.Session"
        )
    try:
        inner = CONFIG_MAPPING[model_type].from_dict({name: value for name, value in values.items() if name != "auto_map"})  # no code of others
    except Exception as error:  # of any type, by the family
        raise _refused(error, model_type, source) from None
    kind = _kind_of(inner, source)
    if dropout is not None:
        _set_dropout(inner, dropout)
    config = LanguageModelConfig(inner, kind)
    try:
        _ = config.module  # families check some values only there
    except Exception as error:  # as above
        raise _refused(error, model_type, source) from None
    return config


def _refused(error: Exception, model_type: str, source: str) -> UsageError:
    """What transformers says of a config, as one sentence."""
    return UsageError(f"{source} is no config of a {model_type}: {' '.join(str(error).split())}; copy it again")


def _kind_of(inner: Any, source: str) -> Kind:
    """What a model of a config learns.

    Raises:
        UsageError: it is no language model.
    """
    model_type = inner.model_type
    classes: dict[Kind, str] = {kind: name for kind, (table, _) in _LOADERS.items() if (name := getattr(modeling_auto, table).get(model_type))}
    named = list(inner.architectures or ())
    usual: tuple[Kind, ...] = ("pairs",) if inner.is_encoder_decoder else ("masked", "causal")
    if "masked" in classes and getattr(inner, "is_decoder", None) is False:  # sees later tokens, which are what a causal one would learn
        usual = tuple(kind for kind in usual if kind != "causal")
    known = [kind for kind in usual if kind in classes]
    found = [kind for kind in known if classes[kind] in named] or known
    if not found:
        what = f"{model_type}{f' ({named[0]})' if named else ''}"
        raise UsageError(
            f"model_type in {source} is {what}, and models that nntask trains through PyTorch are causal, masked or sequence-to-sequence language "
            "models of transformers; train it in a program with wrappers.torch.Session, or wrappers.torch.Trainer"
        )
    return found[0]


def _set_dropout(inner: Any, dropout: float) -> None:
    """Set every probability of dropping an element; layers that are dropped as a whole stay as they are.

    Raises:
        UsageError: the config has none.
    """
    text = inner.get_text_config()
    names = [name for name, value in text.to_dict().items() if ("dropout" in name or name.endswith("pdrop")) and type(value) in (int, float)]
    if not names:
        raise UsageError(f"--dropout {dropout:g} is for dropouts of the config, and that of this {inner.model_type} has none; drop it")
    for name in names:
        setattr(text, name, dropout)
