"""Training objective of a run: --objective and its flags, checked against each other, the data and the model, and filled in.

A config lists the objectives of its model (`objectives`) and its default (`objective`); a config without them is of a causal language model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from ..architecture.config_checks import LARGEST_CLASSES
from ..architecture.family_config import ModelConfig
from ..architecture.interface import LanguageConfig
from ..data.chat import MESSAGES
from ..data.images import IMAGES
from ..data.json_lines import JSONL, first_keys, json_lines
from ..data.objectives import Form, ImageShape, Kind, Objective
from ..data.spans import longest
from ..errors import DataError, Setting, UsageError
from ..models.bert import SINGLE_LABEL
from .settings import DataSettings, TrainSettings, flag_of

SHARE: Final = flag_of("mask_probability")
USUAL_MASK: Final = 0.15
_WITHOUT: Final = {
    "causal": "predicts the next token",
    "masked": "predicts masked tokens",
    "seq2seq": "predicts an output from an input",
    "classify": "predicts a label",
}


def check_objective(data: DataSettings) -> None:
    """Check the values on their own.

    Raises:
        UsageError: a value breaks its rule.
    """
    if not 0.0 < data.mask_probability < 1.0:
        raise UsageError(f"must be above 0 and below 1, got {data.mask_probability:g}", f"for example masked:{USUAL_MASK}", flag=SHARE)


def with_head(settings: TrainSettings, config: ModelConfig) -> ModelConfig:
    """Return the config of a new run with the head of --objective, if the family has one for each objective.

    A classifier made from another model has the classes that the config names (`id2label`), or else those of the labels of --dataset-path: the sorted
    names, or 0 to the largest number.

    Raises:
        UsageError: the initial weights are a classifier's, and the run has another objective.
        DataError: the data are missing or broken.
    """
    asked, begin = settings.data.objective, settings.checkpoints.init_from
    change = getattr(config, "for_objective", None)
    if change is None or asked in (None, config.objective) or asked not in getattr(config, "objectives", ()):
        return config
    if config.objective == "classify" and begin:
        raise UsageError(
            "is a classifier, whose head predicts labels alone, got {0}",
            "use the model that it was made from, or drop --objective",
            flag="--init-from",
            value=begin,
            others=(Setting("--objective", asked),),
        )
    names: tuple[str, ...] = ()
    count = 0
    if asked == "classify" and not config.num_labels and not getattr(config, "id2label", None):
        names, count = _labels(settings.data)
    changed: ModelConfig = change(asked, max(count, 2), names)
    return changed


def _labels(data: DataSettings) -> tuple[tuple[str, ...], int]:
    """Return the names of the labels of lines, and the number of classes if labels are numbers; the reader of the data refuses other labels.

    Raises:
        DataError: a number is not below the largest number of classes.
    """
    if data.dataset != JSONL:
        return (), 0
    names, largest = set[str](), -1
    for lines in json_lines(data.dataset_path, data.val_path, -1):
        for record in lines or ():
            label = record.values.get("label")
            if isinstance(label, str):
                names.add(label)
            elif type(label) is int and label >= LARGEST_CLASSES:  # each number up to it would be a class
                raise DataError(
                    f'{record.where} must have a "label" below {LARGEST_CLASSES}, the largest number of classes, got {label}',
                    "number the classes from 0, or give their names",
                )
            elif type(label) is int:
                largest = max(largest, label)
    return (tuple(sorted(names)), 0) if names and largest < 0 else ((), largest + 1)


def with_objective(settings: TrainSettings, config: LanguageConfig) -> TrainSettings:
    """Return the settings with the objective filled in; --seq-len must be known. Repeating it changes nothing.

    Raises:
        UsageError: the model does not support the objective, or flags are about another objective.
    """
    data, run = settings.data, settings.run
    kind = _kind(data, config)
    _check_flags(settings, kind)
    form = _form(data, kind, config)
    if data.chat_template and form != "chat":
        raise UsageError(f"is for JSON lines with {MESSAGES}, which these data are not", "drop it", flag="--chat-template", value=data.chat_template)
    if form == "pairs" and data.mask_probability != USUAL_MASK:
        clause = f"is for plain texts, in which seq2seq hides spans, got {data.mask_probability:g} with pairs"
        raise UsageError(clause, "drop it", flag=SHARE)
    if kind == "seq2seq":
        data = replace(data, target_len=_target_len(settings, form, config))
    if kind != "causal":
        run = replace(run, sample_tokens=0)
    return replace(settings, data=replace(data, objective=kind), run=run)


def objective_of(settings: TrainSettings, config: LanguageConfig) -> Objective:
    """Return the objective of filled settings."""
    data = settings.data
    kind = _kind(data, config)
    return _objective(settings, data, _form(data, kind, config), config)


def _kind(data: DataSettings, config: LanguageConfig) -> Kind:
    usual: Kind = getattr(config, "objective", "causal")
    able: tuple[Kind, ...] = getattr(config, "objectives", (usual,))
    kind = data.objective or usual
    if kind not in able:
        raise UsageError(
            f"is not for a {config.model_type}, which learns {', '.join(able)}",
            f"use --objective {usual}, or drop it",
            flag="--objective",
            value=kind,
        )
    return kind


def _check_flags(settings: TrainSettings, kind: Kind) -> None:
    """Check flags that belong to some objectives."""
    data, run = settings.data, settings.run
    what = f"a model that {_WITHOUT[kind]}"
    if data.mask_probability != USUAL_MASK and kind not in ("masked", "seq2seq"):
        clause = f"is for masked and seq2seq, which hide tokens, got {data.mask_probability:g} with --objective {kind}"
        raise UsageError(clause, "drop it", flag=SHARE)
    if data.target_len is not None and kind != "seq2seq":
        raise UsageError(f"is for --objective seq2seq, got {what}", "drop it", flag="--target-len", value=data.target_len)
    if data.document_boundaries and kind not in ("causal", "masked"):
        raise UsageError(
            f"is for --objective causal and masked, got {what}, whose rows have sequences of their own", "drop it", flag="--document-boundaries"
        )
    if run.prompt and kind != "causal":
        raise UsageError(f"is for the text of a model that predicts the next token, got {what}", "drop it", flag="--prompt", value=repr(run.prompt))


def _form(data: DataSettings, kind: Kind, config: LanguageConfig) -> Form:
    """Return the form of the data; for JSON lines it follows from the first line."""
    sees = image_shape(config) is not None
    if sees != (data.dataset == IMAGES):
        wants = f"--dataset {IMAGES}" if sees else "a dataset of text, such as --dataset text"
        raise UsageError(f"is not for a {config.model_type}", f"use {wants}", flag="--dataset", value=data.dataset)
    if kind == "classify" and (count := getattr(config, "num_labels", 0)) < 2:
        raise UsageError(
            f"takes a model with two classes or more, got num_labels {count}", "use the config of a classifier", flag="--objective", value="classify"
        )
    if kind == "classify" and (problem := getattr(config, "problem_type", None)) not in (None, SINGLE_LABEL):
        raise UsageError(
            f"learns one label of a text, and problem_type in the config is {problem}",
            f"use the config of a classifier of single labels, or write {SINGLE_LABEL}",
            flag="--objective",
            value="classify",
        )
    if sees:
        if data.tokenizer_path or data.tokenizer != "auto":
            flag, value = ("--tokenizer-path", data.tokenizer_path) if data.tokenizer_path else ("--tokenizer", data.tokenizer)
            raise UsageError(f"is for text, and a {config.model_type} learns from images", "drop it", flag=flag, value=value)
        return IMAGES
    if kind == "classify":
        if data.dataset != JSONL:
            others = (Setting("--dataset", data.dataset),)
            raise UsageError("learns from texts with labels, got {0}", f"use --dataset {JSONL}", flag="--objective", value="classify", others=others)
        return "labels"
    keys = first_keys(data.dataset_path) if data.dataset == JSONL else frozenset()
    if kind == "seq2seq":
        return "pairs" if keys & {"input", "target"} else "stream"
    return "chat" if kind == "causal" and MESSAGES in keys else "stream"


def image_shape(config: LanguageConfig) -> ImageShape | None:
    """Return the shape of images that a model takes; None for a model of text."""
    size = getattr(config, "image_size", None)
    return None if size is None else ImageShape(size, getattr(config, "patch_size", size), getattr(config, "num_channels", 3))


def _target_len(settings: TrainSettings, form: Form, config: LanguageConfig) -> int:
    """Return --target-len or its default: the length of the input for pairs, the length that corrupted spans need for texts."""
    data, length = settings.data, settings.model.seq_len
    assert length is not None  # filled in earlier
    limit = config.longest
    if data.target_len is not None and limit is not None and data.target_len > limit:
        raise UsageError(
            f"must be at most {config.positions_key} = {limit}, got {data.target_len}", f"the nearest legal value is {limit}", flag="--target-len"
        )
    if form == "pairs":
        return data.target_len or length
    sizes = longest(length, data.target_len or config.n_positions, data.mask_probability)
    if sizes is None:
        raise UsageError(
            f"on texts takes --seq-len and --target-len of at least 3, got {length} and {data.target_len}",
            "the nearest legal value is 3",
            flag="--objective",
            value="seq2seq",
        )
    return data.target_len or sizes.output


def _objective(settings: TrainSettings, data: DataSettings, form: Form, config: LanguageConfig) -> Objective:
    names: Any = getattr(config, "id2label", None) or {}
    pad = getattr(config, "pad_token_id", None) or 0
    start = getattr(config, "decoder_start_token_id", None)
    length = settings.model.seq_len
    assert length is not None  # filled in earlier
    return Objective(
        kind=_kind(data, config),
        form=form,
        length=length,
        target_length=data.target_len,
        separates=data.document_boundaries,
        has_pairs=form == "labels" and "pair" in first_keys(data.dataset_path),
        num_token_types=getattr(config, "type_vocab_size", 2),
        mask_probability=data.mask_probability,
        num_labels=getattr(config, "num_labels", 0),
        labels=tuple(str(name) for _, name in sorted((int(at), name) for at, name in names.items())),
        pad=pad,
        start=pad if start is None else start,
        template=data.chat_template,
        image=image_shape(config),
        counts_positions=_counts_positions(config),
    )


def _counts_positions(config: LanguageConfig) -> bool:
    """Return whether a model adds a row of a table for the position of a token; a model without tiles takes no texts that share a sequence."""
    description = getattr(config, "description", None)
    return description is not None and description.stack.num_positions is not None
