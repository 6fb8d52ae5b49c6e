"""BERT (Devlin et al., 2019) and RoBERTa (Liu et al., 2019), with the semantics of transformers' classes for masked language modelling and for the
classification of sequences.

Tokens see each other in both directions, and norms follow the layers. A language model predicts masked tokens with a head of a layer, a norm and the
token embedding. A classifier reads the first token through a layer with tanh. The key ``architectures`` of a config selects one of the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Final, Self

from ..architecture.config_checks import ACTIVATIONS, choice, classes, count, positive, probability, shown, switch, token
from ..architecture.description import BlockShape, Description, HeadShape, NormShape, StackShape
from ..architecture.family_config import HiddenConfig
from ..architecture.foreign_keys import Only, Rules, ignored, off
from ..architecture.names import Names
from ..errors import UsageError

_MODULES: Final = {
    "embed": "embeddings.word_embeddings",
    "stack": "",
    "positions": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
    "blocks": "encoder.layer",
    "q": "self.query",
    "k": "self.key",
    "v": "self.value",
    "out": "output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "feed_forward": "",
    "up": "intermediate.dense",
    "down": "output.dense",
    "feed_forward_norm": "output.LayerNorm",
}
SINGLE_LABEL: Final = "single_label_classification"
PROBLEMS: Final = ("regression", SINGLE_LABEL, "multi_label_classification")
"""Values of problem_type; only the second can be trained here."""


@dataclass(frozen=True, kw_only=True)
class BertConfig(HiddenConfig):
    """Shape and hyperparameters of a BERT; field names and meaning as in ``transformers.BertConfig``.

    Args:
        type_vocab_size: kinds of tokens.
        hidden_act: one of `ACTIVATIONS`.
        hidden_dropout_prob, attention_probs_dropout_prob: dropout probability after embeddings and layers, on attention probabilities.
        classifier_dropout: dropout probability before the classifier; None for hidden_dropout_prob.
        layer_norm_eps: term added to the variance.
        pad_token_id: id of padding.
        num_labels: number of classes; 0 for a masked language model.
        id2label: names of the classes by their numbers, as strings; None for none. A masked language model may have names for a classifier that is
            fine-tuned from it.
        problem_type: kind of labels that a classifier learns, one of `PROBLEMS`; None for a single label. Only a single label can be trained.
    """

    type_vocab_size: int = count(2, 2)
    hidden_act: str = choice(ACTIVATIONS, "gelu")
    hidden_dropout_prob: float = probability(0.1)
    attention_probs_dropout_prob: float = probability(0.1)
    classifier_dropout: float | None = probability(None)
    layer_norm_eps: float = positive(1e-12, 1e-12)
    pad_token_id: int | None = token(0)
    num_labels: int = classes(2, 0, or_zero=True)
    id2label: Mapping[str, str] | None = None
    problem_type: str | None = choice(PROBLEMS, None)
    tie_word_embeddings: bool = switch(True)

    model_type: ClassVar[str] = "bert"
    title: ClassVar[str] = "BERT"
    architecture: ClassVar[str] = "BertForMaskedLM"
    classifier: ClassVar[str] = "BertForSequenceClassification"
    dropouts: ClassVar[tuple[str, ...]] = ("hidden_dropout_prob", "attention_probs_dropout_prob")
    objectives: ClassVar[tuple[str, ...]] = ("masked", "classify")
    unwritten: ClassVar[tuple[str, ...]] = ("problem_type",)
    first_position: ClassVar[int] = 0
    drops_first: ClassVar[bool] = False
    foreign: ClassVar[Rules] = {
        **off("use the config of a model whose tokens see each other in both directions", "is_decoder is_causal"),
        "position_embedding_type": Only(("absolute", None), "use a model with a table of positions"),
        **ignored(
            "older keys that no version of the model reads",
            "directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type",
        ),
    }
    masked_names: ClassVar[Names] = Names(
        modules=_MODULES,
        prefix="bert.",
        embedding="bert.embeddings.word_embeddings.weight",
        head="cls.predictions.decoder.weight",
        outside={
            "head.transform": "cls.predictions.transform.dense",
            "head.transform_norm": "cls.predictions.transform.LayerNorm",
            "head_bias": "cls.predictions.bias",
        },
        aliases={"cls.predictions.decoder.bias": "cls.predictions.bias"},
        older={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
        dropped=("embeddings.position_ids", "embeddings.token_type_ids"),
        unused=("bert.pooler.", "cls.seq_relationship."),
    )
    classifier_names: ClassVar[Names] = replace(
        masked_names,
        head="classifier.weight",
        outside={"head.transform": "bert.pooler.dense", "head_bias": "classifier.bias"},
        aliases={},
        unused=("cls.",),
    )

    @property
    def objective(self) -> str:  # type: ignore[override]
        """Objective that the model is trained for by default."""
        return "classify" if self.num_labels else "masked"

    @property
    def names(self) -> Names:
        """Names and layouts of the model's weights in files."""
        if self.num_labels:
            return self.classifier_names
        return self.masked_names if self.tie_word_embeddings else _with_own_bias(self.masked_names)

    def for_objective(self, objective: str, num_labels: int = 2, names: Sequence[str] = ()) -> Self:
        """Return the same config with the head of an objective.

        Args:
            objective: masked or classify.
            num_labels: number of classes, if neither this config nor `names` determines it.
            names: names of the classes, if this config has none.
        """
        if objective != "classify":
            return replace(self, num_labels=0, id2label=None)
        if self.num_labels:
            return self
        named = self.id2label or {str(number): name for number, name in enumerate(names)}
        count = len(named) or num_labels
        return replace(self, num_labels=count, id2label=None if named in ({}, _numbered(count)) else named)

    @classmethod
    def read(cls, values: Mapping[str, Any], source: str) -> dict[str, Any]:
        """Read the kind of model from ``architectures`` and the classes of a classifier from ``id2label`` or ``num_labels``, by default 2."""
        known, named = super().read(values, source), values.get("id2label")
        if named is not None and not _is_numbered(named):
            raise UsageError(f"id2label in {source} must be an object from the numbers 0, 1, ... to names, got {shown(named)}", "correct it")
        architectures = values.get("architectures")
        if not isinstance(architectures, list | tuple | None):
            raise UsageError(
                f"architectures in {source} must be a list of names of classes, got {shown(architectures)}",
                f'write for example ["{cls.architecture}"]',
            )
        if cls.classifier in (architectures or ()):
            known.setdefault("num_labels", len(named) if named else 2)
        else:
            known["num_labels"] = 0
        names = {str(number): name for number, name in (named or {}).items()}
        is_usual = len(names) == (known["num_labels"] or 2) and names == _numbered(len(names))  # transformers writes two by default
        known["id2label"] = names if names and not is_usual else None
        return known

    @classmethod
    def check_together(cls, values: Mapping[str, Any], source: str) -> None:
        """Check that heads divide the width, that positions remain for tokens, and that every class has a name if any has."""
        super().check_together(values, source)
        if values["max_position_embeddings"] <= cls.first_position:
            raise UsageError(
                f"max_position_embeddings in {source} must be above {cls.first_position}, the position of the first token, got "
                f"{values['max_position_embeddings']}",
                f"the nearest legal value is {cls.first_position + 1}",
            )
        named = values["id2label"]
        if named and values["num_labels"] and len(named) != values["num_labels"]:
            raise UsageError(f"id2label in {source} must name num_labels = {values['num_labels']} classes, got {len(named)}", "correct one of them")

    @property
    def n_positions(self) -> int:
        """P: longest sequence; the table of positions may have some unused rows."""
        return self.max_position_embeddings - self.first_position

    @cached_property
    def description(self) -> Description:
        """Parts of the model."""
        std, norm, p = self.initializer_range, NormShape(kind="layer", eps=self.layer_norm_eps), self.hidden_dropout_prob
        attention = self.attention_shape(has_bias=True, has_out_bias=True, is_causal=False, dropout=self.attention_probs_dropout_prob)
        feed_forward = self.feed_forward_shape(self.hidden_act)
        block = BlockShape(attention=attention, feed_forward=feed_forward, norm=norm, norms="after", dropout=p)
        if self.num_labels:
            dropout = p if self.classifier_dropout is None else self.classifier_dropout
            head = HeadShape(
                is_tied=False, std=std, has_bias=True, transform="tanh", num_labels=self.num_labels, dropout=dropout, drops_first=self.drops_first
            )
        else:
            head = HeadShape(is_tied=self.tie_word_embeddings, std=std, has_bias=True, transform=self.transform, transform_norm=norm)
        stack = StackShape(
            blocks=(block,) * self.n_layer,
            std=std,
            num_positions=self.max_position_embeddings,
            first_position=self.first_position,
            num_token_types=self.type_vocab_size,
            embedding_norm=norm,
            dropout=p,
        )
        return Description(stack=stack, head=head)

    @property
    def transform(self) -> str:
        """Name of the activation of the layer before the scores of tokens."""
        return ACTIVATIONS[self.hidden_act]

    def to_dict(self) -> dict[str, Any]:
        """Return the config as Hugging Face's JSON object."""
        values, names = super().to_dict(), self.id2label
        del values["id2label"], values["num_labels"]
        if self.num_labels:
            values["num_labels"], values["architectures"], names = self.num_labels, [self.classifier], names or _numbered(self.num_labels)
        if names:
            values |= {"id2label": names, "label2id": {name: int(number) for number, name in names.items()}}
        return values


@dataclass(frozen=True, kw_only=True)
class RobertaConfig(BertConfig):
    """Shape and hyperparameters of a RoBERTa; field names and meaning as in ``transformers.RobertaConfig``.

    Its first token has position 2, and the two rows before it belong to padding.
    """

    pad_token_id: int | None = token(1)

    model_type: ClassVar[str] = "roberta"
    title: ClassVar[str] = "RoBERTa"
    architecture: ClassVar[str] = "RobertaForMaskedLM"
    classifier: ClassVar[str] = "RobertaForSequenceClassification"
    first_position: ClassVar[int] = 2
    drops_first: ClassVar[bool] = True
    masked_names: ClassVar[Names] = replace(
        BertConfig.masked_names,
        prefix="roberta.",
        embedding="roberta.embeddings.word_embeddings.weight",
        head="lm_head.decoder.weight",
        outside={"head.transform": "lm_head.dense", "head.transform_norm": "lm_head.layer_norm", "head_bias": "lm_head.bias"},
        aliases={"lm_head.decoder.bias": "lm_head.bias"},
        unused=("roberta.pooler.",),
    )
    classifier_names: ClassVar[Names] = replace(
        masked_names,
        head="classifier.out_proj.weight",
        outside={"head.transform": "classifier.dense", "head_bias": "classifier.out_proj.bias"},
        aliases={},
        unused=("lm_head.", "roberta.pooler."),
    )

    @classmethod
    def read(cls, values: Mapping[str, Any], source: str) -> dict[str, Any]:
        """Check that the id of padding is 1, as in every released model: positions begin after it."""
        if values.get("pad_token_id", 1) != 1:
            raise UsageError(f"pad_token_id in {source} must be 1, from which positions are counted, got {shown(values['pad_token_id'])}", "write 1")
        return super().read(values, source)

    @property
    def transform(self) -> str:
        """Name of the activation of the layer before the scores of tokens."""
        return "gelu"


def _with_own_bias(names: Names) -> Names:
    """Return the names of a model with an untied head: the decoder layer has its bias; the separate bias that tied heads use is ignored."""
    ((layer, beside),) = names.aliases.items()
    return replace(names, outside={**names.outside, "head_bias": layer}, aliases={beside: layer}, spare=(beside,))


def _is_numbered(named: object) -> bool:
    """Return whether these are names by the numbers from 0 on, as whole numbers or strings."""
    if not isinstance(named, Mapping) or not all(isinstance(name, str) for name in named.values()):
        return False
    return {str(number) for number in named} == {str(number) for number in range(len(named))}


def _numbered(count: int) -> dict[str, str]:
    """Return the names that transformers gives to unnamed classes."""
    return {str(number): f"LABEL_{number}" for number in range(count)}


PRESETS: Final[Mapping[str, BertConfig]] = {
    "bert-tiny": BertConfig.of_size(4096, 128, 512, 2, 2, 256).with_dropout(0.0),
    "bert-base": BertConfig.of_size(30522, 768, 3072, 12, 12, 512),
    "bert-large": BertConfig.of_size(30522, 1024, 4096, 24, 16, 512),
}
"""Name -> config: a small one, and BERT base and large (uncased)."""

PRESETS_ROBERTA: Final[Mapping[str, RobertaConfig]] = {
    "roberta-base": RobertaConfig.of_size(50265, 768, 3072, 12, 12, 514, type_vocab_size=1, layer_norm_eps=1e-5),
    "roberta-large": RobertaConfig.of_size(50265, 1024, 4096, 24, 16, 514, type_vocab_size=1, layer_norm_eps=1e-5),
}
"""Name -> config: RoBERTa base and large."""
